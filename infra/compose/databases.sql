-- One database per user of PostgreSQL; `troupe` (the journal) is made by the image, it bears the user's name.
CREATE DATABASE mlflow;
CREATE DATABASE airflow;
