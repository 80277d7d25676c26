"""Simulates Hopper (sm_90) instructions: mbarriers, bulk copies and proxy fences.

Importing the package registers these instructions. The rest of the simulator does not know them.
"""

from . import bulk_load, bulk_prefetch, bulk_store, mbarrier, proxy, wait  # noqa: F401
