"""Model versions: immutable folders with a manifest."""
