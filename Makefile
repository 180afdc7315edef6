# paritree: two commands do all set-up on a fresh machine with Python 3.11+ and a package index.
#   make check   the main job: verify the native and the blocked engine, write an HTML parity report
#   make test    the test suite
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
OUT    ?= paritree-out
JOBS   ?= auto
# Two BLAS threads are several times slower than one at these sizes.
export OPENBLAS_NUM_THREADS ?= 1
export OMP_NUM_THREADS ?= 1
export MKL_NUM_THREADS ?= 1

.PHONY: help setup check test lint types contracts native native-cuda cuda-check llama peers drill bench clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python {v[0]}.{v[1]} found, but paritree needs 3.11 or newer: install it, then run make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	@touch $@

setup: $(VENV)/.installed ## create the environment and install

native: setup ## compile the native engine (also done at first use)
	$(BIN)/python -m impls.native.build

native-cuda: setup ## compile the native CUDA engine (needs nvcc and cuBLAS)
	$(BIN)/python -m impls.cuda.build

cuda-check: setup ## compile the CUDA kernels for every architecture that is claimed; says so where there is no nvcc
	$(BIN)/python -m impls.cuda.build --check --if-present

check: setup ## verify the shipped engines; the report is written to $(OUT)/report.html
	$(BIN)/python -m impls.checkpoint $(OUT)/checkpoint
	$(BIN)/paritree check native blocked --checkpoint $(OUT)/checkpoint --store $(OUT)/store --report $(OUT)/report.html

test: setup ## run the test suite
	$(BIN)/python -m pytest -n $(JOBS) -m "not drill and not gpu"

lint: setup ## style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup ## mypy --strict over the rooms
	$(BIN)/mypy

contracts: setup ## who may import whom
	$(BIN)/lint-imports

$(VENV)-llama/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-llama
	$(VENV)-llama/bin/python -m pip install --quiet -e ".[dev,llama]"
	@touch $@

$(VENV)-peers/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-peers
	$(VENV)-peers/bin/python -m pip install --quiet -e ".[dev,peers]"
	@touch $@

llama: $(VENV)-llama/.installed ## check llama.cpp (a wheel of 34 MB, in an environment of its own)
	$(VENV)-llama/bin/python -m pytest -rs -k "llama or page or unknown" tests/impls/test_peers_conformance.py tests/impls/test_peers_llamacpp.py tests/impls/test_peers_found.py

peers: $(VENV)-peers/.installed ## check transformers on torch, torch's operations and llama.cpp (an environment of its own, over 1 GB)
	$(VENV)-peers/bin/python -m pytest -rs tests/impls/test_peers_conformance.py tests/impls/test_peers_llamacpp.py tests/impls/test_peers_found.py tests/impls/test_peers_ops.py

drill: setup peers ## slow checks: planted engines, peers, browser, fault drills
	$(BIN)/python -m pytest -n $(JOBS) -m "drill"

bench: setup ## measured claims, results in benchmarks/results/
	$(BIN)/python -m benchmarks

clean: ## remove the environment and outputs
	rm -rf $(VENV) $(VENV)-llama $(VENV)-peers $(OUT)
