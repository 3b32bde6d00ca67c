"""Mutation testing of the core with mutmut: ``python -m tests.mutation`` (``make mutation``)."""
