# Contributors and CI run the same targets. Each one creates .venv first, once.
#
#   make setup     .venv with the package (editable) at the versions in constraints.txt
#   make demo      the nine trainings of Hugging Face's guide on two GPUs, and one full memory breakdown
#   make test      install the test requirements and run the tests   (TESTS="tests/reporters -k json" runs some; TEST_JOBS=0: in one process)
#   make test-newest  a quick part of the tests with the releases in constraints-newest.txt, in .venv-newest
#   make check     lint, formatting, spelling, types, import layers, generated documentation
#   make coverage  run the tests with coverage; fails below the floor in pyproject.toml
#   make format    format the code and apply safe lint fixes
#   make docs      rewrite the generated pages in docs/
#   make site      build the documentation site in site/ (mkdocs-material)
#   make accuracy  predict every training that was measured on a GPU, rewrite lab/pages/one-gpu.md and its figures, and
#                  fail if errors grew (several minutes)
#   make same      compute what lab/same has recorded, and show each figure that differs (ten minutes)
#   make compiled  price the points of the shipped calibrations again, after a change of kernel costs
#   make keep-up   try the newest releases of the libraries; build/keep-up/report.md says what they change
#                  (20 minutes with the quick part of the tests; TESTS=tests runs all)
#   make speed     time the command line and compare it with importing the libraries
#
# PIP_ARGS is passed to every pip install. On Linux, torch without CUDA is a much smaller download:
#   make setup PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
CONSTRAINTS := constraints.txt
BIN := $(VENV)/bin
TESTS ?=
PIP_ARGS ?=
RELEASES ?=
QUICK := tests/allocator tests/catalog tests/workload tests/training tests/simulator/test_generation.py
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint $(CONSTRAINTS) $(PIP_ARGS)
SETUP := $(VENV)/.setup-done
TEST_JOBS ?= auto
IN_PARALLEL := -n $(TEST_JOBS) --maxprocesses 4 --dist loadgroup
TEST_SETUP := $(VENV)/.test-setup-done
DEV_SETUP := $(VENV)/.dev-setup-done
DOCS_SETUP := $(VENV)/.docs-setup-done
TORCHVISION := build/torchvision

.PHONY: help setup demo test test-newest same compiled keep-up check coverage format docs site accuracy speed clean

help:
	@sed -n 's/^#   //p' Makefile

setup: $(SETUP)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; name one: make PYTHON=python3.12") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

$(SETUP): pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	$(INSTALL) --editable '.[lora,bitsandbytes]'
	@touch $@

$(TEST_SETUP): $(SETUP)
	$(INSTALL) --editable '.[test]'
	@touch $@

$(DEV_SETUP): $(TEST_SETUP)
	$(INSTALL) --editable '.[dev]'
	@touch $@

$(DOCS_SETUP): $(SETUP)
	$(INSTALL) --editable '.[docs]'
	@touch $@

# For the rows of the accuracy benchmark that need them, outside .venv: PyPI's torchvision is a CUDA build that fails to
# import beside a CPU build of torch, which breaks transformers. lab/accuracy/torchvision_path.py loads it.
$(TORCHVISION)/.done: constraints.txt $(TEST_SETUP)
	$(INSTALL) scipy pillow
	$(INSTALL) --no-deps --upgrade --target $(TORCHVISION) torchvision
	@touch $@

demo: $(SETUP)
	@echo '== The nine trainings of the 2022 guide on its GPU: predicted and published =='
	@$(BIN)/trainatomy compare notebook --gpu v100-16gb --era 2022
	@echo
	@echo '== The same nine trainings on a current GPU =='
	@$(BIN)/trainatomy compare notebook --gpu h200
	@echo
	@echo '== The full memory breakdown of the first training =='
	@$(BIN)/trainatomy predict --model google-bert/bert-large-uncased --model-class BertForSequenceClassification \
		--sequence-length 512 --per-device-train-batch-size 4 --gpu h200

test: $(TEST_SETUP) compiled
	$(BIN)/python -m pytest $(IN_PARALLEL) $(TESTS)

# What changes with a release: rules by version, models, checkpoints, generation, loops.
test-newest:
	$(MAKE) test VENV=.venv-newest CONSTRAINTS=constraints-newest.txt TESTS="$(or $(TESTS),$(QUICK))"

same: $(TORCHVISION)/.done
	$(BIN)/python lab/same/same.py
	$(BIN)/python lab/same/same.py --cudnn

compiled: $(SETUP)
	$(BIN)/python -m trainatomy.timing.compiled

keep-up: $(TORCHVISION)/.done
	$(BIN)/python lab/keep_up/keep_up.py $(RELEASES) --tests $(or $(TESTS),$(QUICK))

coverage: $(TEST_SETUP)
	$(BIN)/python -m pytest $(IN_PARALLEL) --cov --cov-report=term $(TESTS)

check: $(DEV_SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy
	for folder in accuracy timing compiled context everyday fit host parallel same keep_up public; do $(BIN)/mypy --config-file lab/mypy.ini lab/$$folder || exit 1; done
	$(BIN)/lint-imports
	$(BIN)/python docs/generate.py --check

format: $(DEV_SETUP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DEV_SETUP)
	$(BIN)/python docs/generate.py

site: $(DOCS_SETUP)
	$(BIN)/mkdocs build --strict

accuracy: $(TORCHVISION)/.done
	$(BIN)/python lab/accuracy/report.py --check

speed: $(SETUP)
	$(BIN)/python lab/speed.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build dist site .coverage*
