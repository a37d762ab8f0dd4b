"""HTTP as our own servers speak it."""
