# One word per chore; each builds .venv by itself when it is missing or older than pyproject.toml.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
CONFIG ?= configs/demo.yaml
PORT   ?= 8000

# Without an NVIDIA GPU torch's CPU build will do, from PyTorch's own index: PyPI's brings gigabytes of CUDA.
ifeq ($(shell nvidia-smi -L 2>/dev/null),)
TORCH ?= --no-deps 'torch==2.13.0' --extra-index-url https://download.pytorch.org/whl/cpu
else
TORCH ?= 'torch>=2.11'
endif

.PHONY: install serve test test-gpu bench lint clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

serve: install
	$(BIN)/expertd serve --config $(CONFIG) --port $(PORT)

test: install
	$(BIN)/python -m pytest -m "not gpu"

test-gpu: install
	$(BIN)/python -m pytest -m gpu

bench: install
	$(BIN)/python -m benchmarks.grouped_gemm

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info
