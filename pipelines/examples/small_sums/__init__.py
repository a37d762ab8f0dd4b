"""small_sums: sums, differences and products of small numbers for a small pretrained model."""
