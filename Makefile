# make demo | test | test-all | test-browser | lint | docs | wheel | test-lowest. Each sets up its environment by itself, and again only when pyproject.toml changes.

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

# what is tested on the lowest versions: every library that has a lower bound is used by one of these
LOWEST_TESTS ?= tests/test_names.py tests/test_explain.py tests/test_heatmap.py tests/vit/test_adapters.py tests/loading/test_load.py \
	tests/modules/test_modules.py tests/faithfulness tests/runs/test_runs.py tests/runs/test_stress.py tests/runs/test_export.py \
	tests/data/test_streams.py tests/report tests/cli/test_cli.py tests/questions/test_open_clip.py tests/methods/test_oracles.py

.PHONY: demo test test-all test-browser lint setup docs wheel test-lowest clean

setup: $(READY)

$(READY): pyproject.toml
	@test -n "$(PYTHON)" || { echo "steadygaze needs Python 3.11 or newer: install one, or say make PYTHON=/path/to/python" >&2; exit 1; }
	@echo "setting up $(VENV) with $$($(PYTHON) --version): a few minutes, only this once"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable ".[$(EXTRAS)]"
	@touch $@

demo: $(READY)
	@$(BIN)/steadygaze demo --out $(OUT)

PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest

# every class of fault once, in five minutes on two cores
test: $(READY)
	$(PYTEST) -n $(JOBS) --dist worksteal -m "not full and not browser" --durations=20

# every model, every kill, notebooks and examples; shapes are checked in all packages that handle tensors
test-all: $(READY)
	$(PYTEST) -n $(JOBS) --dist worksteal -m "not browser" --durations=20 --hypothesis-profile=full --shapes=all

# the page in a real browser: needs Chromium (Debian: apt-get install chromium), and is skipped without one
test-browser: $(VENV)/.browser
	$(PYTEST) -m browser -rs tests/app/test_browser.py tests/report/test_words_and_tiles.py

$(VENV)/.browser: $(READY)
	$(BIN)/python -m pip install --quiet --editable ".[browser]"
	@touch $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "site/index.html: open it in a browser; no server or network needed"

$(VENV)/.docs: $(READY)
	$(BIN)/python -m pip install --quiet --editable ".[docs]"
	@touch $@

# sdist and wheel; then the wheel alone in an empty environment, far from this folder
wheel: $(VENV)/.build
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python tools/check_wheel.py dist --python "$(PYTHON)"

$(VENV)/.build: $(READY)
	$(BIN)/python -m pip install --quiet "build>=1.2"
	@touch $@

test-lowest: .venv-lowest/.ready
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 .venv-lowest/bin/python -m pytest -n $(JOBS) $(LOWEST_TESTS)

.venv-lowest/.ready: pyproject.toml constraints/lowest.txt
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --constraint constraints/lowest.txt --editable ".[$(EXTRAS)]"
	@touch $@

clean:
	rm -rf $(VENV) .venv-lowest build dist site .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
