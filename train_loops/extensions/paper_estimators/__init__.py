"""Advantage estimators of papers, pure functions."""
