"""Workflows that ship with Troupe, one file each."""
