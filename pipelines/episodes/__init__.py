"""Which episodes an iteration plays, and the warm collectors that play them."""
