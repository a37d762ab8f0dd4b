"""Workflows that are declared in YAML."""
