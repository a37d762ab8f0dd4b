"""Credit rules: an episode's outcome -> a reward per turn, recomputable over stored traces."""
