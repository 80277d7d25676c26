"""Options with which llguidance writes JSON."""

from __future__ import annotations

from typing import Any

#: White space between tokens. Without a bound, small models never end it.
SPACE = r"( |\n{1,2}[ \t]{0,20})?"

#: A schema's keywords are not ignored. Strings have no \\u, with which other names could be spelled
#: as those that a schema declares.
STRICT: dict[str, Any] = {"lenient": False, "json_allowed_escapes": 'nrbtf\\"'}
