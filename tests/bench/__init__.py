"""Benchmarks: what Troupe costs beside its peers. `python -m tests.bench [--only NAME ...]`, or `make bench`."""
