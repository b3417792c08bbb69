# Every command a developer runs; CI runs the same lines. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest -m "not gpu and not multigpu and not slow and not peer"
# One thread per worker: two that use all cores each are slower than either.
PARALLEL := -n auto --maxprocesses 8 --dist loadfile
unit parity: export OMP_NUM_THREADS = 1
# pip takes the CPU wheel of the pinned torch where one is offered, else the CUDA build.
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev demo test unit parity check e2e bench fmt clean

help: ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "hotrack needs Python >= 3.11, got $$($(PYTHON) --version)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing hotrack and torch into $(VENV) (minutes the first time) ..."
	$(INSTALL) -e '.[engine]'
	@touch $@

$(VENV)/.installed-dev: $(STAMP)
	@echo "installing development tools into $(VENV) ..."
	$(INSTALL) -e '.[engine,dev]'
	@touch $@

setup: $(STAMP) ## create .venv and install hotrack with pinned versions
setup-dev: $(VENV)/.installed-dev ## the same plus the development tools

demo: setup ## two real models take turns on this machine (KEEP=1 leaves the server up)
	$(BIN)/hotrack demo $(if $(KEEP),--keep)

test: unit parity e2e ## the full CPU test suite

unit: setup-dev ## the unit tests only (about a minute)
	$(PYTEST) $(PARALLEL) tests/unit

parity: setup-dev ## whole models against transformers, fast paths against plain ones
	$(PYTEST) $(PARALLEL) tests/parity

e2e: setup-dev ## real processes on loopback
	$(PYTEST) tests/e2e

check: setup-dev ## lint, types, import contracts, spelling
	$(BIN)/ruff check src tests tools
	$(BIN)/ruff format --check src tests tools
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell src tests tools docs README.md CHANGELOG.md CONTRIBUTING.md

fmt: setup-dev ## format and fix what can be fixed
	$(BIN)/ruff check --fix-only -q src tests tools
	$(BIN)/ruff format -q src tests tools

bench: setup ## sweep a running server: make bench URL=http://127.0.0.1:8000
	$(BIN)/hotrack bench sweep $(if $(URL),--url $(URL))

clean: ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache dist
