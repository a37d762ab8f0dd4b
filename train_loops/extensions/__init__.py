"""How a model group can learn beside the core, a folder each; the core imports none of them."""
