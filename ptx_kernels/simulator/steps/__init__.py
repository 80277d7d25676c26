"""Instructions as steps: what each does to the lanes that execute it."""
