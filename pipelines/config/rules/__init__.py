"""Rules that join sections of a run config, by topic: each raises ValueError with the key, the value and the fix."""
