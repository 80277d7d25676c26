"""Hopper: mbarriers, bulk copies and proxy fences (sm_90).

Importing it registers these instructions; nothing else of the simulator knows them.
"""

from . import bulk_load, bulk_prefetch, bulk_store, mbarrier, proxy, wait  # noqa: F401
