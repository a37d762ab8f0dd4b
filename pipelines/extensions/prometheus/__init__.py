"""What Prometheus shows of runs."""
