# Contributors and CI share these targets. Every one of them makes .venv first, once.
#
#   make setup     .venv with the package (editable) and the pinned versions of constraints.txt
#   make demo      the main job: the notebook's table, a card of today, and one full bill
#   make test      install what the tests need and run them        (TESTS="tests/faces -k json" for a part)
#   make check     lint, format, types, import contract, generated documentation
#   make format    rewrite the code in the house style
#   make docs      rewrite the generated documentation
#   make accuracy  predict every training that was measured on a GPU, rewrite docs/accuracy.md and its figure, and
#                  fail where errors grew (some minutes)
#   make rivals    ask other tools about the same trainings anew (installs them; MemTracker needs a GPU)
#   make walls     predict anew where the batch meets the end of cards of 8 to 80 GB (many minutes)
#   make times     predict every step time that others published for cards without a calibration (many minutes)
#   make speed     time the command line beside importing the libraries
#
# PIP_ARGS reaches every installation. On Linux, torch without CUDA is a much smaller download:
#   make setup PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TESTS ?=
PIP_ARGS ?=
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt $(PIP_ARGS)
SETUP := $(VENV)/.setup-done
TEST_SETUP := $(VENV)/.test-setup-done
DEV_SETUP := $(VENV)/.dev-setup-done

.PHONY: help setup demo test check format docs accuracy rivals walls times speed clean

help:
	@sed -n 's/^#   //p' Makefile

setup: $(SETUP)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; name one: make PYTHON=python3.12") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

$(SETUP): pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable '.[lora,bitsandbytes]'
	@touch $@

$(TEST_SETUP): $(SETUP)
	$(INSTALL) --editable '.[test]'
	@touch $@

$(DEV_SETUP): $(TEST_SETUP)
	$(INSTALL) --editable '.[dev]'
	@touch $@

demo: $(SETUP)
	@echo '== The notebook of 2022 on its own card: predicted beside published =='
	@$(BIN)/trainatomy compare notebook --gpu v100-16gb --era 2022
	@echo
	@echo '== The same nine trainings on a card of today =='
	@$(BIN)/trainatomy compare notebook --gpu h200
	@echo
	@echo '== The full bill of the first row =='
	@$(BIN)/trainatomy predict --model google-bert/bert-large-uncased --model-class BertForSequenceClassification \
		--sequence-length 512 --per-device-train-batch-size 4 --gpu h200

test: $(TEST_SETUP)
	$(BIN)/python -m pytest $(TESTS)

check: $(DEV_SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/generate.py --check

format: $(DEV_SETUP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DEV_SETUP)
	$(BIN)/python docs/generate.py

accuracy: $(TEST_SETUP)
	$(INSTALL) torchvision
	$(BIN)/python benchmarks/accuracy/report.py --check

rivals: $(TEST_SETUP)
	$(INSTALL) torchvision fitcheck-llm canifinetune fitscout
	$(BIN)/python benchmarks/accuracy/run_rivals.py accelerate_estimate fitcheck canifinetune fitscout

walls: $(TEST_SETUP)
	$(INSTALL) torchvision
	$(BIN)/python benchmarks/accuracy/plan_walls.py --again

times: $(TEST_SETUP)
	$(INSTALL) torchvision
	$(BIN)/python benchmarks/clock/published.py

speed: $(SETUP)
	$(BIN)/python benchmarks/speed.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build dist
