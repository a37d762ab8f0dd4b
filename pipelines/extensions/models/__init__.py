"""Model folders: known models that need no hub, GGUF files, and whether a folder holds a model that answers."""
