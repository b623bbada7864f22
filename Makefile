# Every target sets itself up: a venv in .venv, pinned by requirements.lock, renewed when the lock or pyproject.toml changes.
#
#   make demo    a real trace through eight workers, three ways: what routing by cache and host memory buy
#   make test    the tests; make test ARGS='-m slow' or ARGS=tests/blocks chooses
#   make test-real   the tests that start a real vLLM on CPU (makes its environment, 3 GB, once); ARGS=envoy, nixl, sglang or vllm-suite: others
#   make test-ray    the tests that start a Ray cluster of two nodes here (installs Ray, 260 MB, once)
#   make test-versions   tests of the HTTP seam and the command line with the lowest and the newest allowed dependencies
#   make test-compiled   some of the tests against a compiled install, as CI does
#   make mutants     300 small faults, one at a time: does a test notice? An hour; goes on where it was stopped
#   make fuzz    a minute of bytes for every reader, made to reach new code; SECONDS=7200 for two hours
#   make lint    ruff: rules and formatting          make format  applies what lint asks for
#   make types   mypy, strict
#   make peers   environments of the engines that benchmarks run beside kvyard (3.2 GB), into build/peers
#   make bench   every script in benchmarks/
#   make docs    the documentation, into site/
#   make release   wheels and sdist into dist/, checked in clean environments, and notes from the changelog
#   make lock    requirements.lock from pyproject.toml
#   make clean   removes all that make made

PYTHON ?= python3
WORKERS ?= 2
ARGS ?=

VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check
# A leading underscore marks a helper module, not a benchmark.
BENCHES := $(filter-out benchmarks/_%,$(sort $(wildcard benchmarks/*.py)))

.DELETE_ON_ERROR:
.PHONY: demo test test-real test-ray test-versions test-compiled mutants fuzz lint format types peers bench docs release lock clean setup

demo: $(READY)
	@$(RUN) examples/demo.py

test: $(READY)
	@scripts/setup-test-deps.sh
	@$(RUN) -m pytest -n $(WORKERS) $(ARGS)

test-real: $(READY)
	@PYTHON=$(PYTHON) scripts/test-real.sh $(ARGS)

# Ray lies beside the environment, in a folder of its own: no other test needs it.
RAY := build/ray
test-ray: $(READY)
	@[ -e $(RAY)/.ready ] || { rm -rf $(RAY); $(PIP) --target $(RAY) 'ray==2.60.0' && touch $(RAY)/.ready; }
	@PYTHONPATH="$(RAY):$$PYTHONPATH" $(RUN) -m pytest -m ray $(or $(ARGS),tests/lab/jobs)

test-compiled: $(READY)
	@WORKERS=$(WORKERS) scripts/ci-compiled.sh

mutants: $(READY)
	@$(RUN) scripts/mutate.py --jobs $(WORKERS) $(ARGS)

# Atheris lies beside the environment, in a folder of its own: no test needs it, and it has wheels for few platforms.
ATHERIS := build/atheris
SECONDS ?= 60
fuzz: $(READY)
	@[ -e $(ATHERIS)/.ready ] || { rm -rf $(ATHERIS); $(PIP) --target $(ATHERIS) 'atheris==3.0.0' && touch $(ATHERIS)/.ready; }
	@PYTHONPATH="$(ATHERIS):$$PYTHONPATH" $(RUN) scripts/fuzz.py --seconds $(SECONDS) $(ARGS)

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

format: $(READY)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

types: $(READY)
	$(RUN) -m mypy

peers:
	@PYTHON=$(PYTHON) scripts/peers.sh $(ARGS)

bench: $(READY)
	@set -e; for bench in $(BENCHES); do echo "== $$bench"; $(RUN) $$bench; done

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --site-dir site

release:
	@PYTHON=$(PYTHON) scripts/release.sh $(ARGS)

test-versions:
	PYTHON=$(PYTHON) scripts/test-versions.sh

lock:
	PYTHON=$(PYTHON) scripts/lock.sh

clean:
	rm -rf $(VENV) site dist build .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

setup: $(READY)

# `import pip` fails in a venv that was left half-made or whose Python is gone: such a one is made again.
$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "kvyard needs Python 3.11 or newer as '$(PYTHON)': install it, or name one with make PYTHON=/path/to/python3." >&2; \
		exit 1; }
	@echo "Setting up $(VENV) (once; takes a minute or so)"
	@$(RUN) -c 'import pip' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV) || { \
		echo "kvyard could not make a virtual environment: on Debian, install the python3-venv package." >&2; \
		rm -rf $(VENV); exit 1; }
	@$(PIP) -r requirements.lock
	@# xds-protos brings older files of this one. Whichever is installed last counts, and the newer serve both.
	@$(PIP) --force-reinstall --no-deps "$$(sed -n '/^opentelemetry-proto==/p' requirements.lock)"
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@
