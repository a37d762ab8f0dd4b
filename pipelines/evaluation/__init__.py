"""Playing two teams on the same tasks, and the statistics that decide between them."""
