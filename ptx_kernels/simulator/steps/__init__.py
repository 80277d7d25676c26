"""Instructions as steps: the effect of each on the lanes that execute it."""
