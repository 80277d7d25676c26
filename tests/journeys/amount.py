"""Number of random journeys to run."""

from __future__ import annotations

import os

#: Value of JAX_Q4K_JOURNEYS; 0 runs a small fixed set.
JOURNEYS = int(os.environ.get("JAX_Q4K_JOURNEYS", "0"))
