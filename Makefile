# `make train` and `make test` need Python >= 3.11 and nothing else; each makes .venv when missing.
# `make install` does no more than that.
# JOBS is how many tests run at a time.
# PIP_ARGS passes options to pip, for example an index with CPU-only builds of torch.
# With --no-compile modules are compiled when they are first imported, which all are not. Images for
# containers often forbid to keep that: then each process would compile all that it imports.

PYTHON ?= python3
PIP_ARGS ?=
JOBS ?= 3
TESTS := --numprocesses $(JOBS) --dist worksteal
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install train test test-all bench gpu faults axe docs check lint format clean

install: .venv/run.stamp

train: .venv/run.stamp
	$(BIN)/thinpipe train examples/quickstart.toml

test: .venv/dev.stamp
	$(BIN)/python -m pytest $(TESTS) -m "not slow"

test-all: .venv/dev.stamp
	$(BIN)/python -m pytest $(TESTS)

bench: .venv/dev.stamp
	$(BIN)/python -m benchmarks.links

gpu: .venv/dev.stamp  # all that a GPU can show, within nine minutes; writes a page of results
	$(BIN)/python -m benchmarks.gpu --page auto $(GPU)

faults: .venv/dev.stamp  # on purpose, some as root; FAULTS has options of tests/faults/conftest.py
	$(BIN)/python -m pytest -rP tests/faults $(FAULTS)

axe:  # what checks that the page is accessible; needs npm
	npm install --silent --no-save --prefix build axe-core@4

docs: .venv/docs.stamp
	$(BIN)/sphinx-build -W --keep-going -q -b html docs build/docs

check: lint docs test

lint: .venv/dev.stamp build/typing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

build/typing:  # where mypy finds the packages under their installed names
	mkdir -p $@/thinpipe
	ln -s ../../../launch/api/__init__.py ../../../launch/api/__main__.py ../../../launch/api/py.typed $@/thinpipe
	ln -s ../../../pipeline ../../../aqsgd ../../../gradcomp ../../../launch $@/thinpipe

format: .venv/dev.stamp
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv build *.egg-info

.venv/run.stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than 3.11; run make PYTHON=python3.12, for example"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile $(PIP_ARGS) -c constraints.txt -e .
	touch $@

.venv/dev.stamp: .venv/run.stamp
	$(BIN)/python -m pip install --quiet --no-compile $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	touch $@

.venv/docs.stamp: .venv/run.stamp
	$(BIN)/python -m pip install --quiet --no-compile $(PIP_ARGS) -c constraints.txt -e '.[docs]'
	touch $@
