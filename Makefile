# Two commands on a fresh machine with Python and make:  make demo   and   make test
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test lint types tests slow bench clean help

demo: $(READY)  ## train, score, prune and fine-tune a network on the embedded digits
	$(BIN)/sbf run digits --run runs/demo --force

test: lint types tests  ## everything that must hold before a commit

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

tests: $(READY)
	$(BIN)/python -m pytest

slow: $(READY)  ## the long tests: thousands of random networks
	$(BIN)/python -m pytest -m slow

bench: $(READY)  ## measure again what the documents claim
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/digits.py

# Installed once, and again when what is to be installed changes.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(READY)

clean:
	rm -rf .venv runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

help:
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/  /'
