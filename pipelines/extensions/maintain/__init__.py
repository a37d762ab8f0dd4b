"""Maintenance of what a run has stored: small files merged, and what nothing needs any more removed."""
