"""Example teams, one folder each. Nothing outside this folder imports them but configs and tests."""
