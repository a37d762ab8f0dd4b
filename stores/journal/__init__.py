"""Which stages are done, by which process, and what they returned."""
