# `make test` and `make run` do everything on a bare machine with Python 3.11-3.13.
PYTHON ?= python3
# auto, or cpu for the CPU build of torch on a machine with a GPU, too
TORCH ?= auto
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.civetta-installed

.PHONY: run test check lint types imports docs format clean

NATIVE := $(wildcard src/civetta/*/native/*)

$(STAMP): pyproject.toml CMakeLists.txt scripts/setup.py $(NATIVE)
	$(PYTHON) scripts/setup.py --venv $(VENV) --torch $(TORCH)
	@touch $(STAMP)

run: $(STAMP)
	$(BIN)/civetta serve llm $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -q $(ARGS)

check: lint types imports test

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

imports: $(STAMP)
	$(BIN)/lint-imports

docs: $(STAMP)
	$(BIN)/python scripts/docs.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist
