# make demo   train, export, reload and compare; leaves demo_out/
# make test   linters, type check and the whole test suite
# Both set themselves up: all they need is Python >= 3.10 and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint setup clean

setup: $(READY)

# torch first and alone, so that nothing else chooses its build; then DeepSpeed's build needs, since its sdist imports
# torch; then all the rest, pinned.
$(READY): constraints.txt requirements-dev.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python >= 3.10 is needed, not %d.%d" % sys.version_info[:2]) if sys.version_info < (3, 10) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt setuptools wheel ninja packaging hatchling editables
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --no-build-isolation --constraint constraints.txt \
		--requirement requirements-dev.txt --editable .
	touch $(READY)

demo: $(READY)
	$(BIN)/python examples/demo.py

test: lint
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) demo_out
