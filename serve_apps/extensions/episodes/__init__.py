"""Episodes that programs of a gateway's callers play."""
