# Every target makes its own environment first: .venv with the versions of constraints.txt.

VENV ?= .venv
PYTHON ?= python3
BACKEND ?= torch

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint types

demo: $(INSTALLED)
	$(BIN)/raggedshard train --backend $(BACKEND) --out out

test: $(INSTALLED)
	$(BIN)/python -m pytest

lint: types
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(INSTALLED)
	$(BIN)/pyright --pythonpath $(BIN)/python

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[torch,mindspore,plot,test]'
	touch $@
