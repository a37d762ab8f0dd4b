# gpu: a node with NVIDIA GPUs. From the repository's root:
#   docker build -f infra/containers/gpu.Dockerfile -t troupe-gpu:0.1.0 .
# CUDA's libraries come with the packages of the lock; the node needs NVIDIA's driver and container toolkit. The image
# is not the slim one: Triton compiles its kernels with a C compiler when an engine starts.
FROM python:3.11-bookworm

RUN apt-get update \
 && apt-get install -y --no-install-recommends bubblewrap libnuma1 wget \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/troupe
COPY infra/locks/build.txt infra/locks/build.txt
COPY infra/locks/gpu.txt infra/locks/gpu.txt
# Without isolation: what builds a source package has a hash, too.
RUN pip install --no-cache-dir --require-hashes -r infra/locks/build.txt \
 && pip install --no-cache-dir --no-deps --no-build-isolation --require-hashes -r infra/locks/gpu.txt

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
