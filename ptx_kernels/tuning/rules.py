"""The rules of choice of all families, by the names that tuning tables and reasons use."""

from __future__ import annotations

from ..kernels import FAMILIES
from ..kernels.family import Rule

RULES: dict[str, Rule] = {rule.name: rule for f in FAMILIES.values() for rule in f.rules}
