# megagate's commands; `make help` lists them. Each installs what it needs into .venv first, once.

VENV := .venv
PYTHON := $(VENV)/bin/python
# Marks a finished installation; older than what it was made from, it is made again.
STAMP := $(VENV)/.installed

# `make PYTHON312=/path/to/python3.12 venv` names the interpreter to build .venv with.
PYTHON312 ?=
CANDIDATES := $(PYTHON312) python3.12 python3 python

IS_RECENT := import sys; sys.exit(sys.version_info < (3, 12))
runs_code = $(shell $(1) -c '$(2)' >/dev/null 2>&1 </dev/null && echo yes)
# The first of the candidates that runs and is recent enough, or nothing.
interpreter = $(firstword $(foreach name,$(CANDIDATES),$(if $(call runs_code,$(name),$(IS_RECENT)),$(name))))

NO_PYTHON = megagate needs Python 3.12 or newer on the PATH: install it (for example with `pyenv install 3.12` or \
your system's packages), or name it with `make venv PYTHON312=/path/to/python3.12`
NO_VENV = $(1) lacks the venv and ensurepip modules that make .venv: install them (on Debian and Ubuntu the package \
python3.12-venv), or name another Python with `make venv PYTHON312=/path/to/python3.12`
OLD_VENV = .venv here does not run Python 3.12 or newer: remove it with `rm -r .venv` and run make again

# Processes that `make test` shares the test files among; each starts up to four more. `make test WORKERS=4` on more cores.
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help venv te-env demo test test-full test-te lint bench clean

help:  ## list these commands
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | while IFS='|' read -r name text; do \
		printf '%-18s%s\n' "$$name" "$$text"; done

venv: $(STAMP)  ## make .venv and install megagate into it
	@echo "$(VENV) is ready"

te-env: $(STAMP)  ## make .venv-te: .venv with Transformer Engine, which is compiled once
	@.ci/te_env

demo: $(STAMP)  ## train and evaluate a small gated model and its baseline on this machine
	@$(PYTHON) examples/quickstart/run.py

test: $(STAMP)  ## the tests that fit a laptop
	@$(PYTHON) -m pytest -m "not full" -n $(WORKERS) --dist loadfile

test-full: $(STAMP)  ## every test, the whole matrix of parallel layouts included
	@$(PYTHON) -m pytest

test-te: te-env  ## tests with the real Transformer Engine, on any machine
	@.venv-te/bin/python -m pytest tests/te -n $(WORKERS)

lint: $(STAMP)  ## style, formatting and types
	@$(PYTHON) -m ruff check
	@$(PYTHON) -m ruff format --check
	@$(PYTHON) -m mypy megagate

bench: $(STAMP)  ## the benchmarks
	@$(PYTHON) benchmarks/run.py
	@$(PYTHON) benchmarks/convert.py
	@$(PYTHON) benchmarks/preprocess.py
	@$(PYTHON) benchmarks/data_index.py
	@$(PYTHON) benchmarks/loader.py

clean:  ## remove caches and build products; keeps .venv and runs/
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name .git -prune -o -path ./$(VENV) -prune -o -path ./$(VENV)-te -prune -o -path ./runs -prune -o \
		-type d \( -name __pycache__ -o -name '*.egg-info' \) -exec rm -rf {} +

# $(error) rather than a failing command: make then says the one sentence and nothing else.
$(STAMP): setup.py constraints.txt
	$(if $(wildcard $(VENV)/pyvenv.cfg),$(check-venv),$(make-venv))
	@echo "Installing megagate and what it needs into $(VENV): a few minutes and several GB the first time."
	@$(PYTHON) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m ensurepip >/dev/null
	@PYTHONWARNINGS=ignore $(PYTHON) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

check-venv = $(if $(call runs_code,$(PYTHON),$(IS_RECENT)),,$(error $(OLD_VENV)))

define make-venv
$(if $(interpreter),,$(error $(NO_PYTHON)))
$(if $(call runs_code,$(interpreter),import venv$(comma) ensurepip),,$(error $(call NO_VENV,$(interpreter))))
@$(interpreter) -m venv $(VENV)
endef
comma := ,
