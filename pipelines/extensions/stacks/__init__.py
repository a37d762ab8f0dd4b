"""What the processes of a run are doing when a stage hangs."""
