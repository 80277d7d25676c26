"""How operands lie on a mesh of devices, and which of them an operation gathers."""
