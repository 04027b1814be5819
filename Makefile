# Every target builds the virtual environment first if it is missing or the lock has changed.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: venv demo test test-parts test-sockets test-httpx test-again check format bench soak lock clean
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

# All suites at once: they wait for timers and for each other's processes more than they compute.
test: check
	$(MAKE) --no-print-directory -j3 -O test-parts test-sockets test-httpx
	$(MAKE) --no-print-directory test-again
	$(BIN)/coverage combine -q
	$(BIN)/coverage report --skip-covered

# Each suite has a cache of its own, which says what failed; only failed tests (1) leave the verdict to `test-again`.
SUITE = $(BIN)/pytest -q -o cache_dir=.pytest_cache/$(@:test-%=%) --cache-clear
VERDICT = || [ $$? -eq 1 ]

# Everything but whole gateways over sockets.
test-parts: venv
	COVERAGE_FILE=.coverage.parts $(SUITE) --cov --cov-report= --ignore=tests/integration $(VERDICT)

test-sockets: venv
	COVERAGE_FILE=.coverage.sockets $(SUITE) --cov --cov-report= tests/integration $(VERDICT)

# Once more what goes over the upstream client, with the other one.
OF_EVENTS := $(addprefix --ignore=tests/integration/test_,kv_listen.py kv_sources.py relay_processes.py two_nodes.py)
test-httpx: venv
	TEST_UPSTREAM_CLIENT=httpx $(SUITE) $(OF_EVENTS) tests/integration $(VERDICT)

# What failed while three suites shared the cores is tried once more with the machine to itself, and then counts.
AGAIN = test ! -e .pytest_cache/$(1)/v/cache/lastfailed || $(BIN)/pytest -q -o cache_dir=.pytest_cache/$(1) --lf --lfnf=none
test-again: venv
	$(call AGAIN,parts) tests
	$(call AGAIN,sockets) tests/integration
	TEST_UPSTREAM_CLIENT=httpx; export TEST_UPSTREAM_CLIENT; $(call AGAIN,httpx) tests/integration

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
