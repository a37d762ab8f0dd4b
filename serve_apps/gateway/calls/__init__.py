"""Calls of a team: a chat, a completion, a workflow run, an episode of a program."""
