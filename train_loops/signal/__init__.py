"""Rewards, baselines, KL and losses: what a row is trained for."""
