"""ALFWorld's own engine as a world, with games by seed, in an environment of its own."""
