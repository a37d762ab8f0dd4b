"""Workflows of papers, one file each."""
