# cpu: a node of a CPU cluster (Ray head, workers, jobs) and MLflow's server. From the repository's root:
#   docker build -f infra/containers/cpu.Dockerfile -t troupe-cpu:0.1.0 .
FROM python:3.11-slim-bookworm

# bubblewrap: running code that a model wrote. libnuma1: vLLM. wget: KubeRay's probes.
RUN apt-get update \
 && apt-get install -y --no-install-recommends bubblewrap libnuma1 wget \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/troupe
COPY infra/locks/build.txt infra/locks/build.txt
COPY infra/locks/cluster.txt infra/locks/cluster.txt
# Without isolation: what builds a source package has a hash, too.
RUN pip install --no-cache-dir --require-hashes -r infra/locks/build.txt \
 && pip install --no-cache-dir --no-deps --no-build-isolation --require-hashes \
    --find-links https://download.pytorch.org/whl/cpu/torch/ -r infra/locks/cluster.txt

COPY pyproject.toml README.md LICENSE ./
COPY dags dags
COPY pipelines pipelines
COPY serve_apps serve_apps
COPY train_loops train_loops
COPY stores stores
COPY infra/runs infra/runs
COPY infra/cluster infra/cluster
RUN pip install --no-cache-dir --no-deps --no-build-isolation -e . \
 && useradd --uid 10001 --create-home troupe \
 && mkdir /cache \
 && chown -R troupe /opt/troupe /cache

# --build-arg COMMIT=$(git rev-parse HEAD): teams and reports say which code made them.
ARG COMMIT=
USER troupe
ENV TROUPE_COMMIT=$COMMIT \
    TROUPE_CACHE=/cache \
    PYTHONUNBUFFERED=1 \
    RAY_worker_niceness=0
CMD ["troupe", "--help"]
