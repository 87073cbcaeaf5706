# Everything a fresh machine needs is python3 (3.11 or newer) and make:
#   make demo    train a small GPT under a plan, then plan for a TPU and a GPU
#   make test    run the tests (make test-all: the slow ones, too)
# Each sets up .venv in this folder first. Another Python: make test PYTHON=python3.12

PYTHON ?= python3
VENV ?= .venv
PIP_INSTALL_FLAGS ?=
PYTEST_FLAGS ?=
# One process per core, but no more than fit in memory; a file's tests share programs,
# and files come in the order of tests/conftest.py.
PYTEST_PROCESSES ?= --numprocesses auto --maxprocesses 4 --dist loadfile \
  --no-loadscope-reorder

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
EXTRAS := .[tpu,cuda,demo,report]

export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
export NO_MKDOCS_2_WARNING := 1

.NOTPARALLEL:
.PHONY: help demo test test-all lint format types docs clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | sed -n '1,/^$$/p'
	@echo "  make test-all | lint | format | types | docs | clean"

demo: $(VENV)/.ready-demo
	@$(BIN)/python -m stowax demo

test: $(VENV)/.ready-test
	@$(BIN)/python -m pytest $(PYTEST_PROCESSES) -m "not slow" $(PYTEST_FLAGS)

test-all: $(VENV)/.ready-test
	@$(BIN)/python -m pytest $(PYTEST_PROCESSES) $(PYTEST_FLAGS)

lint: $(VENV)/.ready-lint
	@$(BIN)/ruff check --output-format concise
	@$(BIN)/ruff format --check --quiet || { echo "make format puts the format right" >&2; exit 1; }

format: $(VENV)/.ready-lint
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

# The test group too: the frameworks that tests use have to be there to be checked.
types: $(VENV)/.ready-types
	@$(BIN)/pyright --pythonpath $(BIN)/python

# The site goes to build/site. It loads no font and no script from elsewhere. A broken link,
# anchor or entry of the navigation is an error.
docs: $(VENV)/.ready-docs build/gallery/.made
	@$(BIN)/mkdocs build --quiet
	@echo "build/site is built: $(BIN)/python -m http.server --directory build/site"

# The gallery's pages are those that its own code writes.
build/gallery/.made: docs/howto/gallery.md docs/howto/steps.py docs/tutorial/run.py \
  $(shell find src/stowax -name '*.py' -o -name '*.js' -o -name '*.css') \
  | $(VENV)/.ready-docs
	@echo "Planning and inspecting what the gallery shows ..." >&2
	@rm -rf $(@D) && mkdir -p $(@D)
	@cd $(@D) && JAX_PLATFORMS=cpu $(abspath $(BIN))/python \
	  $(abspath docs/tutorial/run.py) --build $(abspath docs/howto/gallery.md)
	@touch $@

clean:
	rm -rf .venv .venv-newest build dist .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Dependency groups need pip 25.1, newer than the one that Python brings.
$(VENV)/.ready-python:
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
	  echo "stowax needs Python 3.11 or newer: '$(PYTHON)' is not on the PATH." \
	    "Name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "stowax needs Python 3.11 or newer: '$(PYTHON)' is" \
	    "$$($(PYTHON) -V 2>&1). Name another one:" \
	    "make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; exit 2; }
	@echo "Creating $(VENV) with $$($(PYTHON) -V) ..." >&2
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "'$(PYTHON) -m venv' failed. On Debian and Ubuntu it is a package of its" \
	    "own: install python3-venv." >&2; exit 2; }
	@$(PIP) install --upgrade "pip>=25.1"
	@touch $@

$(VENV)/.ready-demo: $(VENV)/.ready-python pyproject.toml
	@echo "Installing stowax with JAX and the TPU and GPU compilers (2 GB) ..." >&2
	@$(PIP) install $(PIP_INSTALL_FLAGS) -e "$(EXTRAS)"
	@touch $@

$(VENV)/.ready-test: $(VENV)/.ready-python pyproject.toml
	@echo "Installing stowax with JAX, the TPU and GPU compilers and the tests'" \
	  "tools (2 GB) ..." >&2
	@$(PIP) install $(PIP_INSTALL_FLAGS) -e "$(EXTRAS)" --group test
	@touch $(VENV)/.ready-demo $@

$(VENV)/.ready-lint: $(VENV)/.ready-python pyproject.toml
	@echo "Installing the linter ..." >&2
	@$(PIP) install $(PIP_INSTALL_FLAGS) --group lint
	@touch $@

$(VENV)/.ready-types: $(VENV)/.ready-test pyproject.toml
	@echo "Installing the type checker ..." >&2
	@$(PIP) install $(PIP_INSTALL_FLAGS) --group types
	@touch $@

# The gallery plans for TPUs and GPUs, and draws pages.
$(VENV)/.ready-docs: $(VENV)/.ready-demo pyproject.toml
	@echo "Installing what builds the documentation ..." >&2
	@$(PIP) install $(PIP_INSTALL_FLAGS) --group docs
	@touch $@
