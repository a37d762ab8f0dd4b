"""Fixtures that several folders share."""

from played_run import play, played_run
from records import make_rewards, make_trace, mlflow_place, mlflow_postgres, mlflow_sqlite

__all__ = ["make_rewards", "make_trace", "mlflow_place", "mlflow_postgres", "mlflow_sqlite", "play", "played_run"]
