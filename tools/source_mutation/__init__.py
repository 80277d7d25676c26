"""Mutation testing of the Python and C++ sources: whether the test suite finds planted bugs."""
