"""Advantage estimators of papers, one pure file each."""
