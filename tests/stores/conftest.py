"""Fixtures that several folders share."""

from records import mlflow_place, mlflow_postgres, mlflow_sqlite

__all__ = ["mlflow_place", "mlflow_postgres", "mlflow_sqlite"]
