# Ridgeway. "make" alone lists what there is.
#
# Variables: PYTHON=python3.13 (which Python to set up with), PYTEST_ARGS, DEMO_ARGS, BENCH_ARGS and so on (passed on),
# UPGRADE=1 (make lock: take newer versions).

MAKEFLAGS += --no-builtin-rules
.SUFFIXES:
.DEFAULT_GOAL := help

PY := .venv/bin/python
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=
SURVIVORS_ARGS ?=
SOAK_ARGS ?=
PERSISTENCE_ARGS ?=
CONFORMANCE_ARGS ?=
VERSIONS_ARGS ?=

.PHONY: help setup demo demo-full test test-fast lint typecheck bench survivors soak persistence conformance versions \
	versions-smoke reshard-memory lock clean distclean

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## Install everything into .venv (nothing to do when it is current)
	@scripts/setup.sh

demo: setup ## Train MaxText on 3 slices, kill a worker, watch the same process train on (one to two minutes)
	@.venv/bin/ridgeway demo $(DEMO_ARGS)

demo-full: setup ## The same on 3 slices x 4 hosts x 4 devices: 48 devices in 12 workers
	@.venv/bin/ridgeway demo --full $(DEMO_ARGS)

test: setup lint typecheck ## Linter, type checker and every test
	$(PY) -m pytest -v --durations=20 $(PYTEST_ARGS)

test-fast: setup ## Only the tests that take seconds: no clusters, nothing slow
	$(PY) -m pytest -m "not slow and not e2e" $(PYTEST_ARGS)

lint: setup ## ruff
	$(PY) -m ruff check .

typecheck: setup ## pyright
	$(PY) -m pyright

bench: setup ## Time recovery and steps, beside native multi-controller jax (minutes)
	$(PY) -m benchmarks.recovery $(BENCH_ARGS)

survivors: setup ## 50 kills at bad moments under overlapping device sets; writes docs/results/survivors.* (minutes)
	$(PY) -m benchmarks.survivors $(SURVIVORS_ARGS)

soak: setup ## 100 faults in a row of every kind for each way to recover; writes docs/results/soak.* (an hour)
	failed=0; for mode in pause resize snapshots; do \
		$(PY) -m benchmarks.soak --mode $$mode $(SOAK_ARGS) || failed=1; done; exit $$failed

persistence: setup ## Save and restore 4.5 GiB with a head capped under 1 GB; writes docs/results/persistence.* (minutes)
	$(PY) -m benchmarks.persistence $(PERSISTENCE_ARGS)

conformance: setup ## JAX's own tests through Ridgeway: JAX_TESTS=<folder of them, of the installed version> (up to an hour)
	@test -n "$(JAX_TESTS)" || { echo "say where JAX's test files are: make conformance JAX_TESTS=<folder>" >&2; exit 2; }
	$(PY) -m conformance.run --jax-tests $(JAX_TESTS) --topology 1x1x8 --topology 2x2x2 --sample 40 --protocol-sample 120 \
		--output docs/results/conformance.md $(CONFORMANCE_ARGS)

versions: setup ## A part of the tests with the oldest and newest supported jax, on Python 3.12 and 3.13 (downloads; an hour)
	$(PY) -m conformance.versions --output docs/results/versions.md $(VERSIONS_ARGS)

versions-smoke: setup ## A few tests with the oldest supported jax, on the newest Python that is here (downloads; minutes)
	$(PY) -m conformance.versions --smoke $(VERSIONS_ARGS)

reshard-memory: setup ## Move 1 GiB between slices; the head's memory must stay flat
	$(PY) -m benchmarks.reshard_memory --output docs/results/reshard_memory.json

lock: ## Make requirements/locked.txt anew from pyproject.toml
	@scripts/lock.sh

clean: ## Remove caches and what was built; keeps .venv and the output of runs
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .coverage
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## Remove .venv too
	rm -rf .venv .venv.old.* .setup.lock
