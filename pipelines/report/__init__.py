"""What people read about a run: the report, summaries, progress lines, lineage."""
