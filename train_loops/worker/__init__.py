"""The trainer's processes: jobs, learner, updates."""
