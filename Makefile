# On a fresh machine: `make demo` or `make test`. Everything is installed into .venv and nowhere else.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
EXTENSION := flash_cuda/_C.abi3.so
SOURCES := $(shell find csrc build_support -type f -not -name '*.pyc' 2>/dev/null) setup.py pyproject.toml

.PHONY: help demo test bench lint format wheel clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /make \1\t/' | expand -t 14

demo: $(EXTENSION) ## set up .venv, build, train the small GPT
	$(BIN)/python -m flash_cuda doctor
	$(BIN)/python examples/train_gpt.py $(DEMO_ARGS)

PYTEST_ARGS ?= -n auto --dist loadgroup
test: lint $(EXTENSION) ## set up .venv, build every kernel, lint, run the tests (GPU ones where there is a GPU)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

bench: $(EXTENSION) ## speed, accuracy, memory and overhead tables (needs a GPU)
	$(BIN)/python -m bench.all $(BENCH_ARGS)

lint: $(STAMPS)/tools ## ruff over all Python
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

format: $(STAMPS)/tools ## ruff and clang-format, in place
	$(BIN)/python -m ruff format .
	find csrc tests \( -name '*.cu' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.h' \) -print0 \
		| xargs -0 -r $(BIN)/clang-format -i

wheel: $(STAMPS)/tools ## dist/flash_cuda-*-cp310-abi3-*.whl
	$(BIN)/python -m pip wheel -v --no-build-isolation --no-deps -w dist .

clean: ## remove what was built; .venv stays
	rm -rf build dist *.egg-info flash_cuda/*.abi3.so

# A venv without pip (Debian without python3-venv) is removed again, so that the next try starts clean.
$(BIN)/python:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 10)' \
		|| { echo "flash_cuda needs Python 3.10 or newer: make PYTHON=/path/to/python3 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV) \
		|| { rm -rf $(VENV); echo "install the venv module, e.g. apt-get install python3-venv"; exit 1; }

# The newest torch that serves this machine; one that is there already is kept.
$(STAMPS)/torch: $(BIN)/python
	$(BIN)/python -m pip install "torch>=2.10"
	mkdir -p $(STAMPS) && touch $@

# The tools of the `dev` extra, read from pyproject.toml so that no list is kept twice.
$(STAMPS)/tools: pyproject.toml $(STAMPS)/torch
	$(BIN)/python -m pip install -q $$($(BIN)/python -m build_support.requirements dev plot)
	touch $@

# With the torch of .venv (no build isolation), so that there is no second one and a rebuild compiles
# only what has changed. build/build.log keeps the registers and spills of every kernel.
$(EXTENSION): $(SOURCES) $(STAMPS)/tools
	mkdir -p build
	$(BIN)/python -m build_support.requirements toolkit | xargs -r $(BIN)/python -m pip install
	$(BIN)/python -m pip install -v --no-build-isolation --no-deps -e . 2>&1 | tee build/build.log \
		| sed -unE 's|^ *(\[[0-9]+/[0-9]+\]) .*/(csrc/[^ ]+\.c[pu]+) .*|\1 \2|p; /flash_cuda: |[Ee]rror/p'
	touch $@
