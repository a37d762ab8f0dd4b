"""state_sizes: how a model group is trained, its number of parameters -> the bytes of a version and of a checkpoint. No torch.

A version is stored in the dtype that trains; adapters in float32. A checkpoint has 8 bytes per trained parameter for Adam's
two moments, and 4 for the weight unless the version has it in float32; a critic's own takes 12.
"""

from __future__ import annotations

from train_loops.config import TrainConfig

MOMENTS_BYTES, WEIGHT_BYTES, BF16_BYTES = 8, 4, 2
"""Of a parameter: both moments of Adam, the weight in float32 and in bfloat16."""


def version_bytes(train: TrainConfig, num_trained: int) -> int:
    """Returns the size of a trained version: its whole weights, or its adapter."""
    return num_trained * (BF16_BYTES if train.deepspeed.bf16 and train.lora is None else WEIGHT_BYTES)


def has_own_weights(train: TrainConfig) -> bool:
    """Says whether a checkpoint holds the policy's weights: the version, in the trainer's dtype or of an adapter, holds others or not all."""
    return train.deepspeed.bf16 or train.lora is not None


def checkpoint_bytes(train: TrainConfig, num_trained: int, num_critic: int = 0) -> int:
    """Returns the size of a checkpoint. Args: num_critic: parameters of a critic that is trained beside the policy."""
    policy_bytes = MOMENTS_BYTES + WEIGHT_BYTES * has_own_weights(train)
    return policy_bytes * num_trained + (MOMENTS_BYTES + WEIGHT_BYTES) * num_critic
