"""Mutation testing of what must not fail silently: `python -m tests.mutation`."""
