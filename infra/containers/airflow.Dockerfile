# airflow: Airflow with the DAGs and the light part of Troupe; neither torch, ray nor vllm. From the repository's root:
#   docker build -f infra/containers/airflow.Dockerfile -t troupe-airflow:0.1.0 .
FROM python:3.11-slim-bookworm

WORKDIR /opt/troupe
COPY infra/locks/build.txt infra/locks/build.txt
COPY infra/locks/airflow.txt infra/locks/airflow.txt
# Without isolation: what builds a source package has a hash, too.
RUN pip install --no-cache-dir --require-hashes -r infra/locks/build.txt \
 && pip install --no-cache-dir --no-deps --no-build-isolation --require-hashes -r infra/locks/airflow.txt

COPY pyproject.toml README.md LICENSE ./
COPY dags dags
COPY pipelines pipelines
COPY serve_apps serve_apps
COPY train_loops train_loops
COPY stores stores
COPY infra/cluster infra/cluster
RUN pip install --no-cache-dir --no-deps --no-build-isolation -e . \
 && useradd --uid 50000 --gid 0 --create-home airflow \
 && mkdir -p /opt/airflow/logs \
 && chown -R airflow /opt/airflow

USER airflow
ENV AIRFLOW_HOME=/opt/airflow \
    AIRFLOW__CORE__DAGS_FOLDER=/opt/troupe/dags \
    AIRFLOW__CORE__LOAD_EXAMPLES=False \
    TROUPE_RUN_CONFIGS=/opt/troupe/infra/cluster/*.yaml
CMD ["airflow", "version"]
