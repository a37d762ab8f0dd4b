"""Whether a team is worth it: one agent trained in its place, and both compared at as many tokens."""
