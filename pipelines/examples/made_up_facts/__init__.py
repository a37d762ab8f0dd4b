"""Questions over a small made-up corpus, for teams that search."""
