"""Tools that the tests use too: ahead-of-time inspection, mutation, tuning tables."""
