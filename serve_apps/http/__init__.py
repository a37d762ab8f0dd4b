"""HTTP as our own servers speak it, and as servers of others are asked."""
