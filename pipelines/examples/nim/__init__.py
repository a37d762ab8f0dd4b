"""Nim, a game of two agents against each other on one world: who takes the last match wins."""
