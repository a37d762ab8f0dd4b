# Troupe. Needs Python 3.11 and make; everything else is set up on first use, inside this folder (.tools, .venv).
# pip's settings are honoured (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, PIP_CERT, pip.conf ...).

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
# Without bytecode every process of a run compiles vLLM and torch again, which doubles its start.
unexport PYTHONDONTWRITEBYTECODE

RUN := infra/runs/demo.yaml
BIN := .venv/bin

.PHONY: help docs demo test soak check bench chaos workflows algorithms up airflow down clean system lock

help:  ## This list
	@grep -hE '^[a-z]+:.*##' Makefile | sed -E 's/^([a-z]+):.*## */\1\t/' | expand -t 10

demo: .venv/.cpu  ## Train the two-model math team of infra/runs/demo.yaml; a stopped demo goes on where it was
	@if grep -qs '"after": {' runs/demo/report.json; then \
	  echo "runs/demo is complete: open runs/demo/report.html. To start over: make clean, then make demo."; \
	else \
	  $(BIN)/troupe train $(RUN); \
	fi

test: check  ## Checks, then every test, end-to-end runs on the real parts included
	$(BIN)/pytest -n 2 -m "not soak" --disable-warnings

check: .venv/.dev  ## Lint, format, import layers, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

docs: .venv/.dev  ## Write the generated reference pages and build the documentation into build/site
	$(BIN)/python infra/docs_reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --config-file infra/mkdocs.yml
	@echo "open build/site/index.html"

bench: .venv/.dev  ## Ratios against peers and limits, side by side; runs/bench/report.json
	$(BIN)/python -m tests.bench

soak: .venv/.dev  ## What `make test` has no time for: whole-team learners, variants, ZeRO-3, the README's example, ...
	$(BIN)/pytest -m soak --disable-warnings

chaos: .venv/.dev  ## kill -9 of every kind of process in every stage; what is done is kept in runs/chaos/report.json
	$(BIN)/python -m tests.chaos

workflows: .venv/.dev  ## Train every workflow of infra/workflows from nothing; runs/workflows/table.md. Goes on where it was
	$(BIN)/python -m tests.showcase

algorithms: .venv/.dev  ## Train every algorithm on the same tasks, three seeds each; runs/algorithms. Goes on where it was
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
	find . -name __pycache__ -not -path './.venv/*' -not -path './.tools/*' -prune -exec rm -rf {} +
	@echo "kept: .venv and .tools (rm -rf .venv .tools), other runs under runs/"

system:  ## Install the system packages that parts beyond the demo use, or name them
	@infra/system.sh

lock:  ## Resolve pyproject.toml again into infra/locks (say why in the commit)
	@infra/setup.sh lock

.venv/.cpu: infra/locks/cpu.txt pyproject.toml infra/setup.sh
	@infra/setup.sh cpu

.venv/.dev: infra/locks/dev.txt pyproject.toml infra/setup.sh
	@infra/setup.sh dev
