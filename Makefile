# make pretrain | make test | make docs | make setup ACCELERATOR=cpu|tpu|cuda
# Versions are those of constraints.txt; `make lock` takes the newest, to be done with Python 3.11 and a newer one.
PYTHON ?= python3
ACCELERATOR ?= cpu
VENV ?= .venv
BIN := $(VENV)/bin
BEAM := $(VENV)-beam
INSTALL := $(BIN)/pip install --quiet -c constraints.txt
JAX_EXTRA := $(if $(filter tpu,$(ACCELERATOR)),[tpu],$(if $(filter cuda,$(ACCELERATOR)),[cuda12],))
MORE := $(if $(filter tpu,$(ACCELERATOR)),-r requirements-gcs.txt,)

.PHONY: pretrain test test-all lint docs lock setup setup-dev setup-docs setup-plan setup-beam

pretrain: setup  ## an ELECTRA on the built-in corpus: prepare, train, evaluate, plot, export
	$(BIN)/python -m pretrain demo

test: lint
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --durations=20

test-all: setup-dev  ## also what is slow, and the bugs of tests/planted.toml
	XLA_FLAGS= $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m ""
	$(BIN)/python -m tests.planted --jobs 2

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

docs: setup-docs  ## the site, into build/docs; a warning is an error
	JAX_PLATFORMS=cpu $(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -c docs . build/docs
	@echo "build/docs/index.html"

lock:  ## the newest versions that the requirements allow, also into constraints.txt; then make test
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade --upgrade-strategy eager -r requirements.txt -r requirements-dev.txt -r requirements-docs.txt
	$(BIN)/python .ci/lock.py

setup: $(VENV)/installed-$(ACCELERATOR)
setup-dev: $(VENV)/installed-dev
setup-docs: $(VENV)/installed-docs
setup-plan: $(VENV)/installed-plan  ## for `python -m tpu plan`
setup-beam: $(BEAM)/installed  ## for `prepare --runner`, in an environment of its own

$(VENV)/installed-%: requirements.txt requirements-gcs.txt constraints.txt
	@case "$(ACCELERATOR)" in cpu|tpu|cuda) ;; *) echo "ACCELERATOR=$(ACCELERATOR): use cpu, tpu or cuda" >&2; exit 2;; esac
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than 3.11: make setup PYTHON=python3.12" >&2; exit 2; }
	@echo "installing into $(VENV): some minutes, in which pip prints nothing"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(INSTALL) -r requirements.txt $(MORE) $(if $(JAX_EXTRA),"jax$(JAX_EXTRA)",)
	touch $@

$(VENV)/installed-dev: requirements-dev.txt requirements-gcs.txt requirements-jieba.txt constraints.txt $(VENV)/installed-$(ACCELERATOR)
	@echo "installing PyTorch and what else the tests need: some minutes"
	$(INSTALL) -r requirements-dev.txt
	touch $@

$(VENV)/installed-docs: requirements-docs.txt constraints.txt $(VENV)/installed-$(ACCELERATOR)
	$(INSTALL) -r requirements-docs.txt
	touch $@

$(VENV)/installed-plan: requirements-plan.txt constraints.txt $(VENV)/installed-$(ACCELERATOR)
	$(INSTALL) -r requirements-plan.txt
	touch $@

$(BEAM)/installed: requirements-beam.txt constraints-beam.txt
	test -x $(BEAM)/bin/python || $(PYTHON) -m venv $(BEAM)
	$(BEAM)/bin/pip install --quiet --upgrade pip
	$(BEAM)/bin/pip install --quiet -c constraints-beam.txt -r requirements-beam.txt
	touch $@
