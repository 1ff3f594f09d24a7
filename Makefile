# One word a job. ARGS="..." reaches the program behind each target.
SHELL := /bin/bash
PY := .venv/bin/python
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-fast lint format bench-datapath lock clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

venv: .venv/.stamp  ## make the virtual environment in .venv (uv where present, else pip)

.venv/.stamp: pyproject.toml constraints.txt scripts/bootstrap
	@scripts/bootstrap

demo: venv  ## show on a real engine what admission control does to an overload
	@$(PY) -m sluicegate_lab demo $(ARGS)

test: venv lint  ## all tests, with branch coverage
	@scripts/system-packages curl prometheus
	@$(PY) -m pytest -n 2 --dist loadfile --cov --cov-report=term $(ARGS)

test-fast: venv  ## the tests without slow ones: under two minutes
	@$(PY) -m pytest -m "not slow" -n 2 --dist loadfile $(ARGS)

lint: venv  ## ruff, mypy strict, import contracts
	@.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy && .venv/bin/lint-imports --no-cache

format: venv  ## let ruff mend what it can
	@.venv/bin/ruff check --fix . ; .venv/bin/ruff format .

bench-datapath: venv  ## the data path against Envoy and nginx, interleaved; writes docs/benchmarks.md
	@scripts/bootstrap bench
	@scripts/system-packages nginx
	@$(PY) -m sluicegate_lab bench-datapath $(ARGS)

lock: venv  ## pin every dependency anew in constraints.txt
	@scripts/lock

clean:  ## remove the virtual environment and every cache
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
