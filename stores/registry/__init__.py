"""Team versions in MLflow, and what a run logs there."""
