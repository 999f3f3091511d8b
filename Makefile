# make demo | make test | make lint. Each sets up .venv by itself, and again only when pyproject.toml has changed.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
EXTRAS ?= dev,hf,app,clip,data
JOBS ?= 2
OUT ?= steadygaze-demo

# the first interpreter that runs and is at least 3.11
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test lint setup clean

setup: $(READY)

$(READY): pyproject.toml
	@test -n "$(PYTHON)" || { echo "steadygaze needs Python 3.11 or newer: install one, or say make PYTHON=/path/to/python" >&2; exit 1; }
	@echo "setting up $(VENV) with $$($(PYTHON) --version): a few minutes, only this once"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable ".[$(EXTRAS)]"
	@touch $@

demo: $(READY)
	@$(BIN)/steadygaze demo --out $(OUT)

test: $(READY)
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
