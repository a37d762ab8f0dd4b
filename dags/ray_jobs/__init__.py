"""ray_jobs: Ray jobs as Airflow tasks. A package of its own, which imports nothing of Troupe."""

from .operator import RayJobOperator, RayJobTrigger

__all__ = ["RayJobOperator", "RayJobTrigger"]
