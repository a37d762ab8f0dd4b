"""Learners that need the whole team: central critics, value mixing, sequential updates."""
