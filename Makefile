# Needs Python 3.11 or newer with pip, and make. Everything else comes from requirements.lock into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help run test check format sim bench clean

help:
	@echo "make run     install, then start one instance here until Ctrl-C (options: make run ARGS='--port 0')"
	@echo "make test    install, then run all tests; starts every server that they need (options: ARGS='-k name')"
	@echo "make check   the fast inner loop: format, lint, types, import contracts, pure tests; no servers"
	@echo "make format  format and fix what can be fixed"
	@echo "make sim     run all services in a simulated world: SEEDS=0:2000 for a range, SEED=17 to replay one"
	@echo "make bench   measure a prefix hit against its miss, what the plane adds, and the memory of each process"
	@echo "make clean   remove .venv; the data directory .data stays"

run: $(INSTALLED)
	@exec $(BIN)/deepserve up $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest $(ARGS)

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest tests/unit tests/contract tests/stateful -m "not servers and not model" --durations=0 --durations-min=1

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

sim: $(INSTALLED)
	@$(BIN)/python -m tests.sim $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),0:200))

bench: $(INSTALLED)
	$(BIN)/deepserve bench prefix $(ARGS)
	$(BIN)/deepserve bench plane $(ARGS)
	$(BIN)/deepserve bench memory $(ARGS)

clean:
	rm -rf $(VENV)

# The lock names every package, so nothing is resolved (ADR 0008). A torch wheel that needs libraries of its own (the
# CUDA builds do) is found out by importing it, and only then are its dependencies fetched.
$(INSTALLED): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "DeepServe needs Python 3.11 or newer; name one with make PYTHON=...")'
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing the packages of requirements.lock into $(VENV); the first time this takes a minute or two"
	@$(PIP) install --no-deps -r requirements.lock
	@$(PIP) install --no-deps --no-build-isolation -e .
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) install "$$(grep '^torch==' requirements.lock)"
	@touch $@
