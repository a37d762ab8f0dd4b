"""Every algorithm on the same tasks, side by side: `python -m tests.algorithms`."""
