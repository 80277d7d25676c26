"""Mutation testing of the Python and C++ sources: does the test suite find planted bugs?"""
