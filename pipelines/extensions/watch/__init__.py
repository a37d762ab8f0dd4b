"""Silent degradation: figures of episodes against their own history, in training and in service."""
