"""Runs one episode of a team and records it."""
