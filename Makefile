# `make train` and `make test` do everything on a fresh machine; the rest is for people who change the code.
PYTHON ?= python3
STRATEGY ?= mirrored
MODEL ?= cnn
DATASET ?= digits
ARGS ?=
TESTS ?= tests
COMMIT ?= $(shell git rev-parse HEAD 2>/dev/null || echo 0)

VENV := .venv
BIN := $(VENV)/bin

.PHONY: env integrations horovod train test test-seventh test-all test-gpu lint docs bench clean

env: $(VENV)/.installed

# The stamp is newer than the lock file exactly when the environment holds what the lock file says.
$(VENV)/.installed: requirements.lock pyproject.toml scripts/make_env.sh
	scripts/make_env.sh $(VENV) $(PYTHON)

# Ray, Spark, trackers, tuners, and sources of data and models: 1.3 GB, which training and `make docs` do not need.
integrations: $(VENV)/.integrations

$(VENV)/.integrations: requirements-integrations.lock $(VENV)/.installed
	@echo "Installing requirements-integrations.lock (some minutes the first time)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $<
	touch $@

# Without it the rest works, and its tests say why they are skipped.
horovod: env
	test $(VENV)/.horovod -nt scripts/install_horovod.sh || scripts/install_horovod.sh $(VENV) || true

ifneq ($(filter horovod mpi mpi_split,$(STRATEGY)),)
train: horovod
endif
train: env
	$(BIN)/python -m tfdist.train --strategy $(STRATEGY) --model $(MODEL) --dataset $(DATASET) $(ARGS)

# Of all tests the quick ones; of those that TESTS names the thorough ones too.
test: horovod integrations
	scripts/run_tests.sh $(BIN)/python "$(if $(filter tests,$(TESTS)),not thorough and )not exhaustive" $(TESTS)

# One seventh of what `make test` leaves out, which follows from the commit.
test-seventh: horovod integrations
	scripts/run_tests.sh $(BIN)/python "thorough and not exhaustive" $(TESTS) --seventh-of $(COMMIT)

# Needs TensorFlow's CUDA libraries: `pip install tensorflow[and-cuda]` of the version in requirements.lock.
test-gpu: horovod
	$(BIN)/python -m pytest --gpu -m "not exhaustive" tests/contract tests/gpu

test-all: horovod integrations
	scripts/run_tests.sh $(BIN)/python "exhaustive or not exhaustive" $(TESTS)

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Opens without a network: build/site/index.html. The notice that is left out is about later versions of mkdocs.
docs: env
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

bench: env
	scripts/run_benchmarks.sh $(BIN)/python $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
