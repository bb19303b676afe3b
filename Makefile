# Two commands: `make demo` trains a policy end to end, `make test` passes the tests; `make
# test-all` those that take long, too. `make docs` builds the site of the documentation into
# build/docs. All make their own environment first; nothing else has to be installed.
#
#   PYTHON       interpreter to start from (3.11 or later)
#   VENV         where the environment goes
#   TORCH_INDEX  index of CPU wheels for torch, where the default index has CUDA builds only
#   NEWER        a later Python for `make test-newer`: the last one that pyenv has
#   RECIPE       what `make demo` runs
#   RUN_ARGS     more arguments for it, such as `--set seed=1`

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
NEWER ?= $(lastword $(sort $(wildcard $(HOME)/.pyenv/versions/3.1[2-9].*/bin/python3)))
RECIPE ?= recipes/sort.yaml
RUN_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
INSTALL := $(PIP) install --constraint constraints-cpu.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

# Every process of a run would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

# As pip does for what is installed and not editable: else every process that starts compiles.
COMPILE := $(BIN)/python -m compileall -q astraflow gen

.PHONY: demo test test-all environments test-newer test-e2e test-long-runs test-long-rest test-models test-agents test-weights test-rest check docs notebooks lock format proto clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	$(BIN)/astraflow run $(RECIPE) $(RUN_ARGS)

# Three parts at once for two cores: tests wait for sockets and processes, whole runs for each
# other. The longest begin. Every part imports what it needs only: torch and transformers take
# seconds.
test: $(VENV)/.dev
	$(MAKE) --no-print-directory --jobs 3 --output-sync=target test-models test-rest test-e2e test-agents test-weights

test-all: test
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target test-long-runs test-long-rest

# Side by side with --jobs: pip does one thing at a time.
environments: $(VENV)/.dev $(if $(NEWER),$(VENV)-newer/.dev)

# What Python's own library changes from release to release: processes, files, bytecode, sockets. The
# compiled parts are those of the other one, as in a wheel.
test-newer: environments
	$(if $(NEWER),$(VENV)-newer/bin/python -m pytest -m "not long" tests/workflows/kept tests/wire tests/rpc \
		tests/storage --ignore tests/storage/test_weight_files.py,@echo "no later Python is here: NEWER=… names one")

test-e2e: $(VENV)/.dev
	$(BIN)/python -m pytest -m "e2e and not long" tests/e2e

test-long-runs: $(VENV)/.dev
	$(BIN)/python -m pytest -m "long and e2e"

test-long-rest: $(VENV)/.dev
	$(BIN)/python -m pytest -m "long and not e2e"

TESTS := $(BIN)/python -m pytest -m "not e2e and not long"
MODELS := $(addprefix tests/,engines tinker trainers)
AGENTS := $(addprefix tests/,cli docs gateway raas testing workflows)
WEIGHTS := $(addprefix tests/,codec launch transport weights)

test-models: $(VENV)/.dev
	$(TESTS) $(MODELS)

test-agents: $(VENV)/.dev
	$(TESTS) $(AGENTS)

test-weights: $(VENV)/.dev
	$(TESTS) $(WEIGHTS)

test-rest: $(VENV)/.dev
	$(TESTS) tests $(addprefix --ignore ,$(MODELS) $(AGENTS) $(WEIGHTS) tests/e2e)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	$(BIN)/python scripts/gen_protos.py --check
	if git rev-parse --quiet --verify refs/tags/v0.1.0 >/dev/null; then \
		$(BIN)/buf breaking --against '.git#tag=v0.1.0'; fi

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/buf format --write

proto: $(VENV)/.dev
	$(BIN)/python scripts/gen_protos.py
	$(BIN)/python scripts/make_api_docs.py
	$(BIN)/python scripts/make_reference.py

docs: $(VENV)/.docs
	$(BIN)/python scripts/build_docs.py

# Every tutorial, with real runs; what its cells print goes into the notebook, for the site.
notebooks: $(VENV)/.dev
	$(INSTALL) --editable '.[notebooks]'
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python scripts/run_notebooks.py --write docs/tutorials/*.ipynb

# The newest releases, but torch's as constraints-cpu.txt has it; then constraints-cpu.txt without
# hashes, so that README's commands install what the tests have passed with.
lock: $(BIN)/python
	$(PIP) install uv
	mkdir -p build
	grep '^torch==' constraints-cpu.txt > build/torch.txt
	$(BIN)/uv pip compile pyproject.toml --extra dev --extra docs --extra notebooks --universal --upgrade \
		--python-version 3.11 --generate-hashes --constraint build/torch.txt \
		--no-header --no-annotate --no-emit-index-url --quiet --output-file requirements/lock.txt
	(sed -n '/^#/p' constraints-cpu.txt; sed -n 's/ *\\$$//; /^[a-z]/p' requirements/lock.txt) > build/constraints.txt
	mv build/constraints.txt constraints-cpu.txt

clean:
	rm -rf $(VENV) $(VENV)-newer build dist *.egg-info

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints-cpu.txt | $(BIN)/python
	$(INSTALL) --editable '.[torch,models,plot]'
	$(COMPILE)
	touch $@

$(VENV)/.docs: pyproject.toml constraints-cpu.txt | $(BIN)/python
	$(INSTALL) --editable '.[docs]'
	touch $@

$(VENV)-newer/.dev: pyproject.toml constraints-cpu.txt
	$(NEWER) -m venv $(VENV)-newer
	$(subst $(BIN),$(VENV)-newer/bin,$(INSTALL)) '.[store,math,postgres,ui]' pytest pytest-asyncio pytest-timeout hypothesis
	touch $@

$(VENV)/.dev: pyproject.toml constraints-cpu.txt | $(BIN)/python
	$(INSTALL) --editable '.[dev]'
	$(COMPILE)
	touch $@ $(VENV)/.demo
