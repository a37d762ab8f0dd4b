#!/usr/bin/env bash
# setup: a lock -> .venv with exactly those versions and this project, editable. `infra/setup.sh cpu|dev|lock`.
# `infra/setup.sh airflow FOLDER`: an environment for Airflow alone, with the light part of this project installed.
#
# Needs Python 3.11 only. uv comes with pip into .tools, or from the PATH where Python has no pip; pip's own settings
# are handed on to uv, which reads none of them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
what=${1:?usage: infra/setup.sh cpu|dev|lock|airflow}
unset PYTHONDONTWRITEBYTECODE PYTHONHOME VIRTUAL_ENV

say() { echo "setup: $*" >&2; }
die() { echo "setup: $*" >&2; exit 1; }

find_python() {
  local name
  for name in ${PYTHON:-} python3.11 python3 python; do
    if "$name" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
      "$name" -c 'import sys; print(sys.executable)'
      return
    fi
  done
  die "no Python 3.11 found: install it (Debian: apt install python3.11), or name one with PYTHON=..."
}

find_uv() {
  if [ ! -x .tools/bin/uv ]; then
    if "$python" -m pip --version >/dev/null 2>&1; then
      say "uv with pip into .tools"
      PIP_REQUIRE_VIRTUALENV=0 PIP_USER=0 "$python" -m pip install --quiet --upgrade --target .tools "uv>=0.8" >&2
    elif command -v uv >/dev/null; then
      command -v uv
      return
    else
      die "$python has no pip, and there is no uv on the PATH: install one of them (Debian: apt install python3-pip)"
    fi
  fi
  echo .tools/bin/uv
}

# The CPU build of torch is not on PyPI: where neither the settings nor PyPI lead to it, PyTorch's own index is asked.
find_torch() {
  local pin index=https://download.pytorch.org/whl/cpu
  pin=$(grep -E '^torch==' "$1")
  "$uv" pip install --quiet --dry-run --no-deps "${flags[@]}" "$pin" >/dev/null 2>&1 && return
  say "$pin is not on the configured indexes: asking PyTorch's CPU index"
  flags+=(--index "$index" --index-strategy unsafe-best-match)
  "$uv" pip install --quiet --dry-run --no-deps "${flags[@]}" "$pin" && return
  die "$pin was not found (see above). The CPU build of torch comes from PyTorch's CPU index, not from PyPI:
  set PIP_EXTRA_INDEX_URL=$index (or a mirror of it), or PIP_FIND_LINKS to a folder that holds its wheel."
}

# Imports what a run imports, in two processes side by side: this compiles just the modules that are used (a third of
# what is installed) and shows at once whether the environment works.
compile() {
  local first second log=.cache/setup-imports.log
  mkdir -p .cache
  say "compiling bytecode"
  export VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=ERROR
  .venv/bin/python -c 'import vllm.v1.engine.async_llm, vllm.v1.worker.cpu_worker, vllm.model_executor.models.qwen3' \
    >"$log" 2>&1 & first=$!
  .venv/bin/python -c 'import mlflow, lancedb, pandas, plotly.offline, math_verify, ray.data, ray.serve, ray.train.torch
import ray.dashboard.head, ray.dashboard.agent, ray.dashboard.modules.serve.sdk, transformers, deepspeed' \
    >>"$log" 2>&1 & second=$!
  wait "$first" && wait "$second" || { cat "$log" >&2; die "the environment does not import (see above)"; }
}

install() {
  local lock=infra/locks/$1.txt began=$SECONDS
  if ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
    rm -rf .venv
    "$uv" venv --quiet --python "$python" .venv
  fi
  export VIRTUAL_ENV=$PWD/.venv
  find_torch "$lock"
  say "$(grep -c == "$lock") packages of $lock"
  # --no-deps: the lock is complete, and resolving again would pull back what overrides.txt leaves out.
  "$uv" pip install --no-deps "${flags[@]}" -r "$lock" 2>&1 | { grep -vE '^ (\+|-|~) |^Downloading' || true; } >&2
  "$uv" pip install --quiet --no-deps --no-build-isolation "${flags[@]}" -e .
  compile
  touch ".venv/.$1"
  [ "$1" != dev ] || touch .venv/.cpu # dev.txt holds all of cpu.txt, at the same versions
  say "done in $((SECONDS - began)) s"
}

light() {
  "$uv" venv --quiet --python "$python" "$1"
  export VIRTUAL_ENV=$1
  "$uv" pip install --quiet --no-deps "${flags[@]}" -r infra/locks/airflow.txt
  rm -rf build # of an earlier build: what was removed since would be installed again
  "$uv" pip install --quiet --no-deps "${flags[@]}" .
  say "Airflow with the light part of Troupe in $1"
}

lock() {
  local options=(--override infra/locks/overrides.txt --python-version 3.11 --no-header --no-annotate --quiet)
  # cpu.txt is cut from dev.txt, so that one environment serves both.
  "$uv" pip compile pyproject.toml --extra cpu --extra dev --extra airflow --extra postgres --extra s3 \
    "${options[@]}" "${flags[@]}" -o infra/locks/dev.txt
  "$uv" pip compile pyproject.toml --extra cpu -c infra/locks/dev.txt "${options[@]}" "${flags[@]}" \
    -o infra/locks/cpu.txt
  "$uv" pip compile pyproject.toml --extra cpu --extra postgres --extra s3 -c infra/locks/dev.txt \
    "${options[@]}" "${flags[@]}" -o infra/locks/cluster.txt
  "$uv" pip compile pyproject.toml --extra airflow --extra postgres -c infra/locks/dev.txt \
    "${options[@]}" "${flags[@]}" -o infra/locks/airflow.txt
  # Of the CPU builds' versions gpu.txt keeps those of the packages that pyproject.toml names; CUDA's vllm pins the rest.
  local named='^(asyncpg|boto3|deepspeed|jinja2|lancedb|math-verify|mlflow|numpy|peft|plotly|psycopg|psycopg-binary|pyarrow|'
  named+='pydantic|pyyaml|ray|rich|safetensors|sqlalchemy|tokenizers|transformers|typer)=='
  options=(--python-version 3.11 --no-header --no-annotate --quiet)
  "$uv" pip compile pyproject.toml --extra gpu --extra postgres --extra s3 "${options[@]}" "${flags[@]}" \
    -c <(grep -E "$named" infra/locks/cluster.txt; grep -E '^torch==' infra/locks/cluster.txt | sed 's/==/!=/') \
    -o infra/locks/gpu.txt
}

python=$(find_python)
uv=$(find_uv)
settings=$("$python" infra/pip_settings.py)
flags=()
eval "$settings"
case $what in
  cpu | dev) install "$what" ;;
  lock) lock ;;
  airflow) light "$(realpath -m "${2:?usage: infra/setup.sh airflow FOLDER}")" ;;
  *) die "unknown set-up $what: cpu, dev, lock or airflow" ;;
esac
