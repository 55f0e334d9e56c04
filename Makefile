# Everything runs in a local virtual environment, made on first use and reused after that.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help install demo test lint bench accuracy wheel-test

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18

install: $(READY) ## make .venv and install llmprof into it, editable

# torch goes first and alone: where an index offers a CPU build of the pinned version, that one is taken.
$(READY): pyproject.toml constraints.txt .ci/installed.py
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python .ci/installed.py || { \
		echo "installing into $(VENV) ..." && \
		$(BIN)/python -m pip install -q -c constraints.txt torch setuptools && \
		$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'; }
	@touch $@

demo: $(READY) ## train 20 steps, capture, show, forecast, write a TensorBoard log
	@PATH="$(CURDIR)/$(BIN):$$PATH" LLMPROF_BIN=$(BIN) sh examples/demo.sh

test: $(READY) ## run the tests, two at a time
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(READY) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY) ## forecast two-rank layouts, train them for real, compare
	$(BIN)/python benchmarks/two_ranks.py

accuracy: $(READY) ## score forecasts on published measurements (TABLES=folder), write benchmarks/RESULTS.md
	$(BIN)/python benchmarks/published_runs.py $(TABLES)

wheel-test: $(READY) ## build sdist and wheel, install the wheel elsewhere, test it there
	$(BIN)/python -m pytest tests/test_packaging.py
