# Each target works on a machine where nothing was installed before: it makes .venv first.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Overrides: make serve PYTHON=/path/to/python3.11 PIP_ARGS="--extra-index-url URL" SERVE_ARGS="--http-port 9000"
PYTHON ?=
PIP_ARGS ?=
SERVE_ARGS ?=
TEST_ARGS ?=
BENCH_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup serve test lint perf-smoke bench clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Make .venv with the package, the server and the development tools

serve: $(STAMP) ## Start the server (first time: fetch and convert the default model pair); SERVE_ARGS="..."
	@exec $(BIN)/adaptive-verification serve $(SERVE_ARGS)

test: $(STAMP) ## Run the unit and integration tests; TEST_ARGS="..."
	$(BIN)/python -m pytest $(TEST_ARGS)

lint: $(STAMP) ## ruff check, ruff format --check, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

perf-smoke: $(STAMP) ## A short load test with perf_analyzer, under two minutes
	$(BIN)/python perf/smoke.py

bench: $(STAMP) ## Adaptive verification against fixed drafts at 1 to 64 requests, a night; BENCH_ARGS="--quick": minutes
	$(BIN)/python perf/load.py $(BENCH_ARGS)

clean: ## Remove .venv and the tools' caches (not the downloaded models)
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis backend/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A usable interpreter is 3.10 to 3.12, can make virtual environments, and has the shared library that Triton's Python
# stub links. The last is only preferred here: without it everything but the server works, and `serve` says what to do.
define USABLE_PYTHON
import ensurepip, os, sys, sysconfig, venv
library = os.path.join(sysconfig.get_config_var("LIBDIR") or "", sysconfig.get_config_var("INSTSONAME") or "")
shared = library.endswith(".so.1.0") and os.path.exists(library)
sys.exit(not ((3, 10) <= sys.version_info[:2] <= (3, 12) and (shared or "any-library" in sys.argv)))
endef
export USABLE_PYTHON

$(STAMP): pyproject.toml
	@python='$(PYTHON)'; \
	for requirement in shared-library any-library; do \
	    for candidate in python3 python3.12 python3.11 python3.10; do \
	        [ -n "$$python" ] || ! $$candidate -c "$$USABLE_PYTHON" $$requirement >/dev/null 2>&1 || python=$$candidate; \
	    done; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "No usable Python 3.10, 3.11 or 3.12 found (it also needs the venv module: apt-get install python3-venv)." >&2; \
	    echo "Install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; \
	    exit 1; \
	fi; \
	[ -x $(BIN)/python ] || { echo "Making $(VENV) with $$python ..."; "$$python" -m venv $(VENV); }
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --editable '.[server,dev]'
	@touch $(STAMP)
