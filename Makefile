# Every target makes its own environment first: .venv with the versions of constraints.txt.

VENV ?= .venv
PYTHON ?= python3

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-long lint types

demo: $(INSTALLED)
	$(BIN)/raggedshard train --out out

test: $(INSTALLED)
	$(BIN)/python -m pytest

test-long: $(INSTALLED)
	$(BIN)/python -m pytest -m long

lint: types
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(INSTALLED)
	$(BIN)/pyright --pythonpath $(BIN)/python

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[torch,mindspore,plot,test]'
	touch $@
