"""Sums and products by a solver and a verifier: the team of `make demo`."""
