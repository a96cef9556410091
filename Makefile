# make demo    install into .venv, measure digits on 1 against 2 CPU devices, print the table
# make test    every check and every test; of the slow ones a quarter, NFOLD_TESTS=all for all
# make check   form, lint and types only
# make docs    write docs/commands.md from the commands themselves, check every link
#
# Needs Python 3.11 or newer and nothing else; PYTHON=python3.12 chooses another one.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test check docs clean

demo: $(INSTALLED)
	$(BIN)/nfold bench digits --devices cpu:1,cpu:2 --batch 480 --epochs 15 --repeat 3

# Two test files at a time: most of their time is the start of processes that use one core. In the
# order of their names, so that the many short ones are last and no worker waits long for the other.
test: check
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

check: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

docs: $(INSTALLED)
	$(BIN)/python tools/commands.py docs/commands.md
	$(BIN)/python -m pytest tests/test_docs.py -m "not integration"

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV)
