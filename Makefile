# Everything here sets up its own environment in .venv; a machine needs Python 3.10 or later with pip and venv.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
INSTALLED = $(VENV)/.installed

.PHONY: demo test test-llamacpp lint types bench clean

demo: $(INSTALLED)  ## give the real SmolLM2-135M a gate and check every claim about it
	$(BIN)/gated-qwen demo --overwrite

test: $(INSTALLED)  ## the whole suite
	$(BIN)/python -m pytest -n auto --dist loadfile

test-llamacpp: $(INSTALLED)  ## GGUF export against the real llama.cpp
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[llamacpp]"
	$(BIN)/python -m pytest tests/llamacpp

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)  ## mypy cannot follow the editable install's folder mapping, so it reads an installed copy
	rm -rf $(VENV)/types
	$(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/types .
	MYPYPATH=$(VENV)/types $(BIN)/mypy
	rm -rf build

bench: $(INSTALLED)  ## overhead against transformers' Qwen3 and Qwen3-MoE; results go to benchmarks/results
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/overhead.py --family moe

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) gated-smollm2-135m build dist .pytest_cache .mypy_cache .ruff_cache
