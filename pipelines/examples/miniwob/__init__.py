"""Web pages of MiniWoB++ in a real browser as worlds, in an environment of their own."""
