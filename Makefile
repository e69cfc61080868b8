# Every target makes its own environment first: .venv with the versions of constraints.txt.

VENV ?= .venv
PYTHON ?= python3
# The framework to install and run with. mindspore: the packages are in constraints.txt, nothing runs with it yet.
BACKEND ?= torch

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed-$(BACKEND)

ifneq ($(BACKEND),torch)
$(error BACKEND=$(BACKEND): only torch runs today)
endif

.PHONY: demo test lint types

demo: $(INSTALLED)
	$(BIN)/raggedshard train --out out

test: $(INSTALLED)
	$(BIN)/python -m pytest

lint: types
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(INSTALLED)
	$(BIN)/pyright --pythonpath $(BIN)/python

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[$(BACKEND),plot,test]'
	touch $@
