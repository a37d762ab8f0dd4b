"""How a model group learns: advantages, losses, critic, batching, DeepSpeed engines, the warm trainer."""
