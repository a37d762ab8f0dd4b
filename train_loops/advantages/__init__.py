"""Advantage estimators, one pure file each."""
