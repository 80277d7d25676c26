"""How many random journeys run."""

from __future__ import annotations

import os

#: As JAX_Q4K_JOURNEYS says; 0: a fixed handful.
JOURNEYS = int(os.environ.get("JAX_Q4K_JOURNEYS", "0"))
