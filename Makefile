# make run    set everything up and run the recipe `tiny`
# make test   set everything up and pass the tests
# make check  linters, types, import contracts        make lock  resolve the exact versions again
# make bench  what conducting costs, as ratios
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv
LOCK := requirements-cpu.txt
READY := $(VENV)/.ready

# uv does not read pip's settings: hand over a local wheel folder and a certificate where pip has them,
# and take CPU builds of torch from PyTorch's own index where no local folder holds one.
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
endif
ifdef PIP_CERT
export SSL_CERT_FILE ?= $(PIP_CERT)
endif
HAS_LOCAL_TORCH := $(wildcard $(firstword $(UV_FIND_LINKS))/torch-*+cpu-*)
BACKEND := $(if $(HAS_LOCAL_TORCH),,--torch-backend cpu)

export OMP_WAIT_POLICY ?= PASSIVE
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run up test check bench setup lock clean
run: setup
	@$(BIN)/posttrain run tiny

up: setup
	@$(BIN)/posttrain up

test: setup
	@OMP_NUM_THREADS=1 $(BIN)/pytest

check: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	@$(BIN)/python tests/bench/overhead.py

setup: $(READY)

$(READY): $(LOCK) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14) and "posttrain needs Python 3.11 to 3.13; this is " + sys.version.split()[0] + "; set PYTHON=/path/to/python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@test -x $(UV) || $(BIN)/python -m pip install --quiet --disable-pip-version-check uv==0.13.9
	@echo "installing $$(grep -c == $(LOCK)) packages into $(VENV) (one to three minutes)"
	@$(UV) pip sync --quiet --compile-bytecode --python $(BIN)/python $(BACKEND) $(LOCK)
	@$(UV) pip install --quiet --no-deps --compile-bytecode --python $(BIN)/python -e .
	@touch $(READY)

lock:
	$(UV) pip compile --quiet --no-header --overrides cpu-overrides.txt --extra cpu --extra dev $(BACKEND) pyproject.toml -o $(LOCK)

clean:
	rm -rf $(VENV) .posttrain
