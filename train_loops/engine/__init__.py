"""A model of one group: loading, DeepSpeed, checkpoints, export, warm start."""
