# make demo    measure digits on 1 and on 2 CPU devices, in a small environment of its own
# make test    run every check and every test, with a rotating part of the slow tests (NFOLD_TESTS=all: all)
# make check   run ruff and mypy only
# make docs    generate the reference of commands, build the site without network, check every link
#
# Needs Python 3.11 or newer; PYTHON=python3.12 chooses another one.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DOCS_INSTALLED := $(VENV)/.docs-installed
DEMO := .venv-demo
DEMO_INSTALLED := $(DEMO)/.installed

.PHONY: demo test check docs clean

demo: $(DEMO_INSTALLED)
	$(DEMO)/bin/nfold bench digits --devices cpu:1,cpu:2 --batch 128 --epochs 15 --repeat 3

# Two test files at a time: most of their time is the start of processes that use one core. In the
# order of their names, so that the many short ones are last and no worker waits long for the other.
test: check
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

check: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

docs: $(INSTALLED) $(DOCS_INSTALLED)
	$(BIN)/python tools/commands.py docs/commands.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python -m pytest tests/test_docs.py -m "not integration"

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# Only `make docs` needs MkDocs, so that `make test` does not install it.
$(DOCS_INSTALLED): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

# Without tests, TensorFlow and JAX: nfold, PyTorch and what the HTML report needs.
$(DEMO_INSTALLED): pyproject.toml constraints.txt
	test -x $(DEMO)/bin/python || $(PYTHON) -m venv $(DEMO)
	$(DEMO)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[report]'
	touch $@

clean:
	rm -rf $(VENV) $(DEMO) site
