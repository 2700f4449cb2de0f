# Two commands for a fresh machine with Python 3.11: `make train` runs the main job, `make test` checks the project.
# Both do their own set-up (deploy/setup.sh) and repeat it only when the packages asked for have changed.

PY := .venv/bin/python
CONFIG ?= libero_object_quick
RUN_DIR ?= runs/$(CONFIG)
WORKERS ?= 2
ITERATIONS ?= 2

.PHONY: train test test-all check lint types setup clean

train: .venv/.stamp
	$(PY) -m wamrl_ray train --config $(CONFIG) --run-dir $(RUN_DIR) --workers $(WORKERS) \
		--iterations $(ITERATIONS) --resume auto $(ARGS)

test: lint types
	$(PY) -m pytest

test-all: lint types
	$(PY) -m pytest -m ""

check: test

lint: .venv/.stamp
	$(PY) -m ruff check .

types: .venv/.stamp
	$(PY) -m mypy

setup: .venv/.stamp

.venv/.stamp: pyproject.toml constraints.txt deploy/setup.sh
	./deploy/setup.sh

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
