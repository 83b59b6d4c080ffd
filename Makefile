# Two commands on a fresh machine with Python and make:  make demo   and   make test
PYTHON ?= python3
TORCH ?= 2.15.0
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test test-torch lint types tests slow bench docs clean help

demo: $(READY)  ## train, score, prune and fine-tune a network on the embedded digits
	$(BIN)/sbf run digits --run runs/demo --force

test: lint types tests  ## everything that must hold before a commit

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# One process per core, and a file in one of them: its fixtures and caches are made once.
tests: $(READY)
	$(BIN)/python -m pytest -n auto --dist loadfile

slow: $(READY)  ## the long tests: thousands of random networks, and cases that differ in detail
	$(BIN)/python -m pytest -m slow -n auto --dist loadfile

# In an environment of its own, of several GB. pip picks the torchvision that goes with this torch.
test-torch: .venv-torch-$(TORCH)/.ready  ## the tests on another torch, saved in the table: make test-torch TORCH=2.15.0
	.venv-torch-$(TORCH)/bin/python benchmarks/torch_versions.py

.venv-torch-%/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-torch-$*
	.venv-torch-$*/bin/python -m pip install --quiet --disable-pip-version-check torch==$* torchvision -e ".[dev]"
	.venv-torch-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps timm==1.0.30
	touch $@

bench: $(READY)  ## measure again what the documents claim (coverage of all networks takes half an hour)
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/digits.py
	$(BIN)/python benchmarks/speed.py
	$(BIN)/python benchmarks/forms.py
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps torch-pruning==1.6.1
	$(BIN)/python benchmarks/coverage.py --stale
	$(BIN)/python benchmarks/vs_torch_pruning.py --stale
	$(BIN)/python benchmarks/tables.py

# Not --quiet: what is not said is not counted, and nothing would be strict.
docs: $(READY)  ## the documents as a site, in build/docs; a broken link or anchor stops it
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-warn-conflicts -c constraints.txt -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

# Installed once, and again when what is to be installed changes.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
# Networks to test on; without their dependencies, which would bring another build of torch. Without them tests skip.
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps torchvision==0.28.0 timm==1.0.30
	touch $(READY)

clean:
	rm -rf .venv .venv-torch-* runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

help:
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/  /'
