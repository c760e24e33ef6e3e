# One word for each chore: `make help` lists them. Each updates .venv to the lock files by itself.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
CONFIG ?= configs/demo.yaml
PORT   ?= 8000
EXPERTD ?= $(BIN)/expertd
SECONDS ?= 600
CASES   ?= 100000

# Without an NVIDIA GPU, torch's CPU build is enough. It is in PyTorch's own index; PyPI's brings gigabytes of CUDA.
ifndef VARIANT
VARIANT := $(if $(shell nvidia-smi -L 2>/dev/null),cuda,cpu)
endif
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
UV := uv==0.13.9
# Reads indexes of packages, of which those for development are many, in a third of the time of Python's own.
NEW_PIP := pip==26.3
PIP := -m pip --disable-pip-version-check
# Tests start hundreds of processes: each would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE

# Stamps in .venv: the locked packages of one variant, the server and the client, what development needs on top, and
# the bytecode of what tests import.
LOCKED   := $(VENV)/.locked-$(VARIANT)
RUNTIME  := $(VENV)/.runtime
DEV      := $(VENV)/.dev
COMPILED := $(VENV)/.compiled
DOCS    := build/docs-venv
ENGINES := build/engines-venv

.PHONY: help install install-dev install-engines serve test test-all test-fast test-client test-engines test-gpu soak soak-pool fuzz bench docs lint format check lock clean

help: ## list the chores
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | awk -F '|' '{ printf "make %-15s %s\n", $$1, $$2 }'

install: $(RUNTIME) ## build .venv with only the packages that the server needs
	@echo "$(BIN)/expertd is installed ($(VARIANT))"

install-dev: $(RUNTIME) $(DEV) ## add what tests, checks and the documents' examples need
	@echo "$(VENV) is ready for development ($(VARIANT))"

install-engines: $(ENGINES)/.built ## build build/engines-venv with vLLM for CPUs and expertd-vllm: 3 GB
	@echo "$(ENGINES)/bin/expertd-vllm is installed"

serve: $(RUNTIME) ## serve CONFIG (the demo layer) on PORT (8000)
	$(BIN)/expertd serve --config $(CONFIG) --port $(PORT)

# Each file of the server's tests runs in one of JOBS processes: more than there are cores, because many wait, but each
# process imports all files first, in 16 seconds of CPU.
# The client's and those of engines/sglang run beside them, and what BESIDE names.
JOBS ?= 3
SHORT := not gpu and not timing and not thorough
RUN_TESTS = $(MAKE) --no-print-directory -j3 --output-sync=target server-tests client-tests $(BESIDE)
# Files with tests of the mark: all others take longer to collect than these to run.
TIMING = $$(grep -rl --include='test_*.py' 'mark\.timing' tests) -m "timing and not gpu"

test: $(COMPILED) ## run what each change should pass: no GPU, 6 minutes on 2 cores
	+$(RUN_TESTS) MARKS="$(SHORT)"

test-all: docs $(COMPILED) ## run every test that needs no GPU, and those that measure time by themselves
	+$(MAKE) --no-print-directory all-tests

.PHONY: all-tests server-tests client-tests minute-soak minute-soak-pool minute-soak-nixl style types
all-tests: $(COMPILED)
	+$(RUN_TESTS) minute-soak minute-soak-pool minute-soak-nixl MARKS="not gpu and not timing"
	$(BIN)/python -m pytest $(TIMING)
	cd client && ../$(BIN)/python -m pytest $(TIMING)

server-tests: $(COMPILED)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "$(MARKS)"

client-tests: $(COMPILED)
	cd client && ../$(BIN)/python -m pytest -m "$(MARKS)"
	cd engines/sglang && ../../$(BIN)/python -m pytest

# Beside the tests, since their times do not count. Without pauses, callers would take every core they get.
minute-soak: $(RUNTIME) $(DEV)
	$(BIN)/python -m tests.soak --seconds 60 --growth 0.1 --pause 0.05

minute-soak-pool: $(RUNTIME) $(DEV)
	$(BIN)/python -m tests.soak.pool --seconds 60 --every 18 --busy --pause 0.02

minute-soak-nixl: $(RUNTIME) $(DEV)
	$(BIN)/python -m tests.soak.nixl --kills 20 --every 5

test-fast: $(COMPILED) ## run only the quick ones
	+$(RUN_TESTS) MARKS="$(SHORT) and not slow"

test-client: $(RUNTIME) $(DEV) ## run the client's tests against EXPERTD, the command of any installed server
	cd client && EXPERTD=$(abspath $(EXPERTD)) ../$(BIN)/python -m pytest -m "not gpu"

test-engines: $(RUNTIME) $(DEV) $(ENGINES)/.built ## run the tests of engines/ with vLLM on a CPU: 15 minutes
	cd engines/vllm && EXPERTD=$(abspath $(EXPERTD)) $(abspath $(ENGINES))/bin/python -m pytest
	$(BIN)/python -m tests.soak.vllm --vllm $(ENGINES)/bin/python --expertd $(EXPERTD) --seconds 60 --every 18 --tokens 8 --busy
	cd engines/sglang && EXPERTD=$(abspath $(EXPERTD)) SGLANG_PYTHON=$(abspath $(ENGINES))/bin/python ../../$(BIN)/python -m pytest

test-gpu: $(RUNTIME) $(DEV) ## run the tests that need a Hopper GPU
	$(BIN)/python -m pytest -m gpu
	cd client && ../$(BIN)/python -m pytest -m gpu

soak: $(RUNTIME) $(DEV) ## run a server under everything for SECONDS (600), and count what becomes of requests
	$(BIN)/python -m tests.soak --seconds $(SECONDS) $(SOAK)

soak-pool: $(RUNTIME) $(DEV) ## kill, stop and drain the servers of a pool for SECONDS (600), and count lost calls
	$(BIN)/python -m tests.soak.pool --seconds $(SECONDS) $(SOAK)

fuzz: $(RUNTIME) $(DEV) ## send CASES (100000) of bytes of every kind to each parser
	CASES=$(CASES) $(BIN)/python -m pytest --timeout 0 -m "not gpu" tests/fuzz

bench: $(RUNTIME) $(DEV) ## time the grouped GEMMs on the GPU at hand
	$(BIN)/python -m benchmarks grouped_gemm

docs: $(DOCS)/.built ## build the documentation as a site in build/docs/site, with every link checked
	$(DOCS)/bin/python -m deploy.documentation build/docs

lint: style types ## check locks, style, formatting and types

style: $(RUNTIME) $(DEV)
	$(BIN)/python -m requirements.lock --check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror kernels/csrc/* client/src/expertd_client/channel/*.cu

# mypy needs 20 seconds for torch: all but the first read what it found, if they have the same options for torch's
# modules and for those that torch imports.
types: $(RUNTIME) $(DEV)
	$(BIN)/mypy
	for folder in client engines/vllm engines/sglang; do \
		test -d $$folder/.mypy_cache || cp -r .mypy_cache $$folder || exit; \
		(cd $$folder && $(abspath $(BIN))/mypy) || exit; \
	done

format: $(RUNTIME) $(DEV) ## rewrite Python and CUDA files in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i kernels/csrc/* client/src/expertd_client/channel/*.cu

# The site is built beside the installation, style is checked beside the compilation, and types beside the tests: each
# of these leaves a core idle, always or now and then.
check: ## what CI runs but for the image: lint, and every test that needs no GPU
	+$(MAKE) --no-print-directory -j2 --output-sync=target docs style $(COMPILED)
	+$(MAKE) --no-print-directory all-tests BESIDE=types

lock: ## update the lock files after a change of requirements (UPGRADE=1: to the newest versions)
	$(PYTHON) -m venv --clear build/lock
	build/lock/bin/python $(PIP) install $(UV)
	build/lock/bin/python -m requirements.lock $(if $(UPGRADE),--upgrade)

clean: ## remove .venv and build outputs
	rm -rf $(VENV) build dist *.egg-info

# Few modules of all these packages are ever imported: Python compiles those when they are.
INSTALL := $(BIN)/python $(PIP) install --no-compile

# From scratch, so that .venv holds exactly what the lock says, and no package from an older one.
$(LOCKED): requirements/torch-cpu.txt requirements/$(VARIANT).txt
	$(PYTHON) -m venv --clear $(VENV)
ifeq ($(VARIANT),cpu)
	$(INSTALL) --no-deps --retries 2 --timeout 15 --extra-index-url $(TORCH_CPU_INDEX) \
		-r requirements/torch-cpu.txt || { \
		echo "No CPU build of torch was found for this Python: installing the one with CUDA, several GB."; \
		$(INSTALL) --require-hashes -r requirements/cuda.txt; }
endif
	$(INSTALL) --require-hashes -r requirements/$(VARIANT).txt
	touch $@

$(RUNTIME): $(LOCKED) pyproject.toml client/pyproject.toml
	$(INSTALL) --no-deps --no-build-isolation -e . -e ./client
	touch $@

$(DEV): $(LOCKED) requirements/dev.txt requirements/beside.txt | $(RUNTIME)
	$(INSTALL) $(NEW_PIP)
	$(INSTALL) --require-hashes -r requirements/dev.txt
	$(BIN)/python $(PIP) download --require-hashes --no-deps -r requirements/beside.txt -d $(VENV)/beside
	touch $@

# Otherwise each of the tests' first processes would compile all modules, all at once.
$(COMPILED): $(RUNTIME) $(DEV)
	-$(BIN)/python -m pytest -q --collect-only > /dev/null
	touch $@

# In an environment of its own, because neither the server nor its tests need these packages.
$(DOCS)/.built: requirements/docs.txt
	$(PYTHON) -m venv --clear $(DOCS)
	$(DOCS)/bin/python $(PIP) install --no-compile --require-hashes -r requirements/docs.txt
	touch $@

# vLLM needs other versions of packages than the server. It takes its torch from where .venv does.
$(ENGINES)/.built: requirements/torch-cpu.txt requirements/engines.txt engines/vllm/pyproject.toml client/pyproject.toml
	$(PYTHON) -m venv --clear $(ENGINES)
	$(ENGINES)/bin/python $(PIP) install --no-compile --no-deps --extra-index-url $(TORCH_CPU_INDEX) \
		-r requirements/torch-cpu.txt
	$(ENGINES)/bin/python $(PIP) install --no-compile --no-deps --require-hashes -r requirements/engines.txt
	$(ENGINES)/bin/python $(PIP) install --no-compile --no-deps --no-build-isolation -e client -e engines/vllm
	touch $@
