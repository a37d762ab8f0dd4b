"""A world that is a source repository: agents read it, change it and run its tests, which are graded behind the walls of the sandbox."""
