"""What the models of a run take: dtypes, bytes on disk and memory."""
