"""Global, shared and local memory of a launch; every access is checked."""
