# Every target works on a fresh clone: the first one that needs it makes .venv and installs into it.
# PYTHON=... chooses the interpreter for .venv; ARGS=... is passed on to pytest.

SHELL := /bin/sh
VENV  := .venv
PY    := $(VENV)/bin/python
READY := $(VENV)/.ready
TORCH := torch==2.13.0
TEST  := OMP_NUM_THREADS=1 $(PY) -m pytest --timeout=600

.DEFAULT_GOAL := help
.PHONY: help setup demo test check laws multi ops bench format clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(READY)  ## make .venv and install everything (the other targets do it when needed)

demo: $(READY)  ## train a small GPT on four virtual devices
	$(PY) examples/01_train_gpt.py

# Real processes have the machine to themselves: a rank that waits for a core runs into a time-out.
test: $(READY)  ## run all tests that need no GPU
	$(TEST) -n 2 -q -m "not gpu and not multi" $(ARGS)
	$(TEST) -q -m multi $(ARGS)

check: $(READY)  ## lint, format, types, floors and house rules
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(PY) -m pyright --pythonpath $(PY)
	$(TEST) -q tests/arch

laws: $(READY)  ## property tests with the full profile (minutes)
	$(TEST) --timeout=3600 --hypothesis-profile=full tests/laws $(ARGS)

multi: $(READY)  ## tests with real processes over Gloo
	$(TEST) -m multi $(ARGS)

ops: $(READY)  ## judge every torch op on every sharding (25 minutes, resumable); writes docs/ops.md
	OMP_NUM_THREADS=1 $(PY) -m shardwise.testing.ops --docs docs/ops.md $(ARGS)

bench: $(READY)  ## the overhead table, side by side with torch
	$(PY) benchmarks/overhead.py

format: $(READY)  ## let ruff fix and format what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:  ## remove .venv and all caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first and by exact version, so that no other package decides which build is taken.
# The stamp is written last: an interrupted install is simply done again.
$(READY): pyproject.toml
	@$(PY) -m pip --version >/dev/null 2>&1 || { \
	  for python in $(PYTHON) python3.11 python3.12 python3.13 python3.14 python3; do \
	    if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	      echo "making $(VENV) with $$python"; exec $$python -m venv --clear $(VENV); \
	    fi; \
	  done; \
	  echo "shardwise needs Python 3.11 or newer with the venv module; set PYTHON=/path/to/python" >&2; exit 1; }
	$(PY) -m pip install --disable-pip-version-check --quiet $(TORCH)
	$(PY) -m pip install --disable-pip-version-check --quiet -e '.[dev,demo,cli]'
	@touch $@
