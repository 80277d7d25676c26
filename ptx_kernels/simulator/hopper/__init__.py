"""Instructions of sm_90: mbarriers, bulk copies and proxy fences."""
