# Every target builds the virtual environment first if it is missing or the lock has changed.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: venv demo test test-suite test-httpx check format bench soak lock clean
.DEFAULT_GOAL := test

venv: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Forebay needs Python 3.11 or newer, this is " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	touch $(STAMP)

demo: venv
	$(BIN)/forebay demo

check: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -q tests/test_conventions.py

# Both suites at once: each of them keeps one core busy.
test: check
	$(MAKE) --no-print-directory -j2 -O test-suite test-httpx

test-suite: venv
	$(BIN)/pytest -q --cov --cov-report=term:skip-covered

# Once more what goes over the upstream client, with the other one.
test-httpx: venv
	TEST_UPSTREAM_CLIENT=httpx $(BIN)/pytest -q -p no:cacheprovider tests/integration

format: venv
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: venv
	$(BIN)/python -m benchmarks

soak: venv
	$(BIN)/pytest -q -s -m soak --override-ini addopts= tests

# Needs uv on the PATH. Names, versions and hashes only: no index address gets into the locks.
COMPILE := uv pip compile pyproject.toml --universal --python-version 3.11 --generate-hashes --no-header --no-annotate

lock:
	$(COMPILE) --extra dev -o requirements.lock
	$(COMPILE) -c requirements.lock -o requirements-run.lock

clean:
	rm -rf $(VENV) .coverage .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
