# Troupe. Needs make and Python 3.11, 3.12 or 3.13 (PYTHON=... names one); everything else is installed on first use, inside
# this folder (.tools, .venv). pip's settings apply (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, PIP_CERT, pip.conf ...).

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
# Without bytecode every process of a run compiles vLLM and torch again, which doubles its start.
unexport PYTHONDONTWRITEBYTECODE

RUN := infra/runs/demo.yaml
BIN := .venv/bin

.PHONY: help docs demo demo-real fast test nightly check house bench chaos gpu-check mutation workflows algorithms up airflow down clean system lock

help:  ## Print this list
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## */\1\t/' | expand -t 12

demo: .venv/.cpu  ## Train the two-model math team of infra/runs/demo.yaml; continues a run that was stopped
	@if grep -qs '"after": {' runs/demo/report.json; then \
	  echo "runs/demo is complete: open runs/demo/report.html. To start over: make clean, then make demo."; \
	else \
	  $(BIN)/troupe train $(RUN); \
	fi

demo-real: .venv/.cpu  ## Download SmolLM2-135M-Instruct (93 MB) and train a team of two agents on it; continues a run that was stopped
	@PATH="$$PWD/.tools/bin:$$PATH" $(BIN)/troupe model get smollm2 models/smollm2
	@if grep -qs '"after": {' runs/demo-real/report.json; then \
	  echo "runs/demo-real is complete: open runs/demo-real/report.html. To start over: rm -r runs/demo-real"; \
	else \
	  $(BIN)/troupe train infra/runs/demo-real.yaml; \
	fi

fast: check  ## Before a commit: the checks, and the tests that start no Ray, engine or server
	$(BIN)/pytest -n 2 --tier fast --disable-warnings

test: check  ## On each push: the checks, and one test of each real part
	$(BIN)/pytest -n 2 --tier test --disable-warnings

nightly: check  ## Each day: the checks, every test, and one row of `make chaos`
	$(BIN)/pytest -n 2 --tier nightly --disable-warnings
	$(BIN)/python -m tests.chaos --victims driver --again

check: .venv/.dev  ## Check lint, format, import layers and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy --num-workers 2

house: .venv/.dev  ## Print how much source there is and where it is not as meant (ARGS=--paths: files that run, by a real iteration)
	@$(BIN)/python infra/house.py $(ARGS)

docs: .venv/.dev  ## Write the generated reference pages and build the documentation into build/site
	$(BIN)/python infra/docs_reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --config-file infra/mkdocs.yml
	@echo "open build/site/index.html"

bench: .venv/.dev  ## Measure Troupe against other systems and hard limits; writes runs/bench/report.json
	$(BIN)/python -m tests.bench

chaos: .venv/.dev  ## Kill every kind of process in every stage; continues runs/chaos/report.json
	$(BIN)/python -m tests.chaos

gpu-check:  ## On a machine with GPUs: check engines, trainers, sync and sharing; writes runs/gpu-check/table.md
	@if ! nvidia-smi -L 2>/dev/null | grep -q GPU; then \
	  echo "gpu-check: no GPU here (nvidia-smi shows none), nothing was installed or checked" >&2; exit 3; \
	fi
	@$(MAKE) --no-print-directory .venv-gpu/.gpu
	@PATH="$$PWD/.venv-gpu/bin:$$PATH" .venv-gpu/bin/python -m tests.gpu_check $(ARGS)

mutation: .venv/.dev  ## Change the code in one place at a time and count what its tests notice; continues runs/mutation
	$(BIN)/python -m tests.mutation

workflows: .venv/.dev  ## Train every workflow of infra/workflows from scratch; continues runs/workflows/table.md
	$(BIN)/python -m tests.showcase

algorithms: .venv/.dev  ## Train every algorithm on the same tasks, three seeds each; continues runs/algorithms
	$(BIN)/python -m tests.algorithms

up: .venv/.cpu  ## Start a Ray head that outlives commands (this machine only)
	@infra/ray_head.sh up

airflow: .venv/.dev  ## Start Airflow with the DAGs of infra/runs, a Ray head and MLflow (this machine only)
	@infra/airflow.sh up

down:  ## Stop what `make up` and `make airflow` started, and nothing else
	@infra/airflow.sh down
	@infra/ray_head.sh down

clean:  ## Remove the demo's run and caches; keeps the environment (rm -rf .venv .tools removes that)
	rm -rf runs/demo .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis build
	find . -name __pycache__ -not -path './.venv/*' -not -path './.venvs/*' -not -path './.tools/*' -prune -exec rm -rf {} +
	@echo "kept: .venv and .tools (rm -rf .venv .tools), other runs under runs/"

system:  ## Install the system packages that optional parts use, or print their names
	@infra/system.sh

lock:  ## Resolve pyproject.toml into infra/locks for Python 3.11 to 3.13 (give the reason in the commit)
	@infra/setup.sh lock

.venv/.cpu: infra/locks/cpu.txt pyproject.toml infra/setup.sh
	@infra/setup.sh cpu

.venv/.dev: infra/locks/dev.txt pyproject.toml infra/setup.sh
	@infra/setup.sh dev

.venv-gpu/.gpu: infra/locks/gpu.txt pyproject.toml infra/setup.sh
	@infra/setup.sh gpu
