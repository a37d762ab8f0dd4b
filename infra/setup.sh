#!/usr/bin/env bash
# setup: a lock -> .venv with exactly those versions and this project, editable. `infra/setup.sh cpu|dev|lock`.
# `infra/setup.sh gpu`: the same from gpu.txt in .venv-gpu, beside the CPU's .venv, which stays as it is. Never yet run on
# a machine with a GPU.
# `infra/setup.sh airflow FOLDER`: an environment for Airflow alone, with the light part of this project installed.
#
# Needs Python 3.11, 3.12 or 3.13: PYTHON=... names one; else that of .venv, else the oldest that is found; where there is
# none, uv downloads one. uv is installed with pip into .tools, or taken from the PATH where Python has no pip. uv does
# not read pip's settings: infra/pip_settings.py passes them on.
#
# Every file that is installed, uv and the tools that build packages from source included, has a hash in infra/locks; a file
# with another hash is refused, whichever index it came from.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
what=${1:?usage: infra/setup.sh cpu|dev|gpu|lock|airflow}
unset PYTHONDONTWRITEBYTECODE PYTHONHOME VIRTUAL_ENV

say() { echo "setup: $*" >&2; }
die() { echo "setup: $*" >&2; exit 1; }

is_supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }
minor_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

# Prints the interpreter's path; nothing where no Python is supported.
find_python() {
  local name
  if [ -n "${PYTHON:-}" ]; then
    is_supported "$PYTHON" || die "PYTHON=$PYTHON is no Python 3.11, 3.12 or 3.13 that runs"
    "$PYTHON" -c 'import sys; print(sys.executable)'
    return
  fi
  if is_supported .venv/bin/python; then
    .venv/bin/python -c 'import sys; print(sys._base_executable)'
    return
  fi
  for name in python3.11 python3.12 python3.13 python3 python; do
    if is_supported "$name"; then
      "$name" -c 'import sys; print(sys.executable)'
      return
    fi
  done
}

# Any Python can install uv, also one that is too old for the project.
find_uv() {
  local name
  if [ -x .tools/bin/uv ]; then
    echo .tools/bin/uv
    return
  fi
  for name in ${python:+"$python"} python3 python; do
    if "$name" -m pip --version >/dev/null 2>&1; then
      say "installing uv into .tools with pip"
      PIP_REQUIRE_VIRTUALENV=0 PIP_USER=0 "$name" -m pip install --quiet --upgrade --target .tools --require-hashes \
        -r infra/locks/uv.txt >&2
      echo .tools/bin/uv
      return
    fi
  done
  command -v uv || die "no uv on the PATH, and no Python with pip to install it: install one of them \
(Debian: apt install python3-pip)"
}

download_python() {
  say "no Python 3.11, 3.12 or 3.13 found: uv downloads 3.11 into .tools/python"
  export UV_PYTHON_INSTALL_DIR=$PWD/.tools/python
  "$uv" python install --no-bin 3.11 >&2 && "$uv" python find --managed-python 3.11 && return
  die "uv could not download a Python (see above). Install 3.11, 3.12 or 3.13 (Debian: apt install python3.11), name one
  with PYTHON=..., or set UV_PYTHON_INSTALL_MIRROR to a mirror of the downloads."
}

# The CPU build of torch is not on PyPI: where the configured indexes lack it, PyTorch's page of torch is added. It is a page
# of links, not a second index: no other package is looked for there.
find_torch() {
  local pin page=https://download.pytorch.org/whl/cpu/torch/ look
  pin=$(grep -oE '^torch==[^ ]+' "$1")
  look=("$uv" pip install --quiet --dry-run --no-deps --python "$python" --target .cache/torch "$pin")
  "${look[@]}" "${flags[@]}" >/dev/null 2>&1 && return
  say "$pin is not on the configured indexes: asking PyTorch"
  flags+=(--find-links "$page")
  "${look[@]}" "${flags[@]}" && return
  die "$pin was not found (see above). The CPU build of torch comes from PyTorch, not from PyPI:
  set PIP_FIND_LINKS=$page (or a mirror of it, or a folder that holds its wheel)."
}

# install_lock LOCK OPTION...: exactly those files. --no-deps: the lock is complete, and resolving again would pull back what
# overrides.txt leaves out.
install_lock() {
  "$uv" pip install --no-deps --require-hashes "${build[@]}" "${flags[@]}" -r "$@"
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
  if [ "$(minor_of .venv/bin/python)" != "$(minor_of "$python")" ]; then
    rm -rf .venv
    "$uv" venv --quiet --python "$python" .venv
  fi
  export VIRTUAL_ENV=$PWD/.venv
  find_torch "$lock"
  say "$(grep -c == "$lock") packages of $lock"
  install_lock "$lock" 2>&1 | { grep -vE '^ (\+|-|~) |^Downloading' || true; } >&2
  "$uv" pip install --quiet --no-deps --no-build-isolation "${flags[@]}" -e .
  compile
  touch ".venv/.$1"
  [ "$1" != dev ] || touch .venv/.cpu # dev.txt holds all of cpu.txt, at the same versions
  say "done in $((SECONDS - began)) s"
}

gpu() {
  local began=$SECONDS lock=infra/locks/gpu.txt
  case $(minor_of "$python") in
    3.11 | 3.12) ;;
    *) die "$lock serves Python 3.11 and 3.12, this is $(minor_of "$python"): name one with PYTHON=..." ;;
  esac
  [ "$(minor_of .venv-gpu/bin/python)" = "$(minor_of "$python")" ] || rm -rf .venv-gpu
  [ -x .venv-gpu/bin/python ] || "$uv" venv --quiet --python "$python" .venv-gpu
  export VIRTUAL_ENV=$PWD/.venv-gpu
  say "$(grep -c == "$lock") packages of $lock, about 10 GB with CUDA's libraries"
  # A folder of wheels that pip's settings name may hold the CPU build of torch, which the same version would accept.
  install_lock <(sed 's/^torch==/torch===/' "$lock") >&2
  "$uv" pip install --quiet --no-deps --no-build-isolation "${flags[@]}" -e .
  touch .venv-gpu/.gpu
  say "done in $((SECONDS - began)) s"
}

light() {
  [ -x "$1/bin/python" ] || "$uv" venv --quiet --python "$python" "$1"
  export VIRTUAL_ENV=$1
  install_lock infra/locks/airflow.txt --quiet
  rm -rf build # of an earlier build: what was removed since would be installed again
  "$uv" pip install --quiet --no-deps "${build[@]}" "${flags[@]}" .
  say "Airflow with the light part of Troupe in $1"
}

# resolve NAME NEWER OPTION...: infra/locks/NAME.txt for Python 3.11, with what the newer Pythons need besides, at the same
# versions. torch is left out for these: its dependencies are in the lock, and its CPU build may be at hand for 3.11 only.
resolve() {
  local lock=infra/locks/$1.txt pythons=$2 version scratch others=()
  shift 2
  scratch=$(mktemp -d)
  cp "$lock" "$scratch/before"
  "$uv" pip compile pyproject.toml --python-version 3.11 "$@" "${flags[@]}" -o "$lock"
  for version in $pythons; do
    "$uv" pip compile pyproject.toml --python-version "$version" "$@" "${flags[@]}" -c "$lock" \
      --override <(echo "torch ; sys_platform == 'never'") -o "$scratch/$version" >/dev/null
    others+=("$version=$scratch/$version")
  done
  "$python" infra/merge_locks.py "$lock" "${others[@]}" "before=$scratch/before" >"$scratch/merged"
  cat "$scratch/merged" >"$lock"
  rm -r "$scratch"
}

# Of one index: on two, a package that somebody else put on the other under the same name could be taken.
lock() {
  local plain=(--no-header --no-annotate --quiet --generate-hashes) name
  local all='3.12 3.13' options=(--override infra/locks/overrides.txt "${plain[@]}")
  flags=()
  eval "$("$python" infra/pip_settings.py --one-index)"
  find_torch infra/locks/dev.txt
  for name in uv build; do
    "$uv" pip compile "infra/locks/$name.in" --universal --python-version 3.11 "${plain[@]}" "${flags[@]}" \
      -o "infra/locks/$name.txt"
  done
  # cpu.txt is cut from dev.txt, so that one environment serves both.
  resolve dev "$all" --extra cpu --extra gguf --extra dev --extra airflow --extra postgres --extra s3 --extra login \
    "${options[@]}"
  resolve cpu "$all" --extra cpu --extra gguf -c infra/locks/dev.txt "${options[@]}"
  resolve cluster "$all" --extra cpu --extra gguf --extra postgres --extra s3 --extra login -c infra/locks/dev.txt \
    "${options[@]}"
  resolve airflow "$all" --extra airflow --extra postgres -c infra/locks/dev.txt "${options[@]}"
  # gpu.txt has the CPU builds' versions of the packages that pyproject.toml names, and of setuptools, which vllm bounds on
  # 3.12 and newer only; CUDA's vllm pins the rest.
  local named='^(asyncpg|boto3|deepspeed|jinja2|lancedb|math-verify|mlflow|numpy|peft|plotly|psycopg|psycopg-binary|pyarrow|'
  named+='pydantic|pyyaml|ray|rich|safetensors|setuptools|sqlalchemy|tokenizers|transformers|typer)=='
  local constraints
  constraints=$(mktemp)
  sed 's/ \\$//' infra/locks/cluster.txt | grep -E "$named" >"$constraints"
  sed -nE 's/^torch==([^ ]+).*/torch!=\1/p' infra/locks/cluster.txt >>"$constraints"
  # Not for 3.13: flashinfer pins a cuda-python that has no wheel for it.
  resolve gpu 3.12 --extra gpu --extra postgres --extra s3 -c "$constraints" "${plain[@]}"
  rm "$constraints"
  # The peer of `make bench` has nothing of ours. Its torch keeps the hashes that dev.txt has.
  "$uv" pip compile infra/locks/trl.in --python-version 3.11 "${plain[@]}" "${flags[@]}" -o infra/locks/trl.txt
  "$python" infra/merge_locks.py infra/locks/trl.txt before=infra/locks/dev.txt >"${constraints}.trl"
  mv "${constraints}.trl" infra/locks/trl.txt
}

python=$(find_python)
uv=$(find_uv)
[ -n "$python" ] || python=$(download_python)
say "Python $(minor_of "$python") ($python)"
settings=$("$python" infra/pip_settings.py)
flags=()
eval "$settings"
build=(--build-constraints infra/locks/build.txt) # setuptools and wheel, which a source package is built with
case $what in
  cpu | dev) install "$what" ;;
  gpu) gpu ;;
  lock) lock ;;
  airflow) light "$(realpath -m "${2:?usage: infra/setup.sh airflow FOLDER}")" ;;
  *) die "unknown set-up $what: cpu, dev, gpu, lock or airflow" ;;
esac
