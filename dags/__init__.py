"""Airflow: one file per DAG family, and the operator that runs troupe commands as Ray jobs. Imports nothing heavy."""
