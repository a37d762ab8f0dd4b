"""Games of TextArena as worlds, in an environment of their own."""
