"""Which turn decided an episode: it is played again from each turn."""
