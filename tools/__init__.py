"""Tools also used by tests: ahead-of-time inspection, mutation, tuning tables."""
