"""The page at `/` of a gateway."""
