"""A household game in ALFWorld's words: one room, one task, a planner and an actor on one world."""
