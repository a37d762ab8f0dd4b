"""example_dag: two Ray jobs, of which the second gets the result of the first. Copy it into your DAG folder."""

from __future__ import annotations

from airflow.sdk import DAG
from ray_jobs import RayJobOperator

COUNT = "python -c \"import json, ray; ray.init(); print('AIRFLOW_RESULT: ' + json.dumps(ray.cluster_resources()))\""

with DAG(dag_id="ray_jobs_example", schedule=None, catchup=False, tags=["ray"]):
    count = RayJobOperator(task_id="count", entrypoint=COUNT, timeout_s=600, retries=2)
    show = RayJobOperator(
        task_id="show",
        entrypoint="echo This cluster has {{ ti.xcom_pull(task_ids='count')['CPU'] }} CPUs.",
        reserves={"entrypoint_num_cpus": 1},
    )
    count >> show
