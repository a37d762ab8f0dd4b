"""Figures: what guards, canary traffic, watching, training warnings, metrics and reports compare, one object for each."""
