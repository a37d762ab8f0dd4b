"""Where worlds live: worker processes, and OpenEnv servers."""
