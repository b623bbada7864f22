#!/usr/bin/env bash
# The compiled build, tested: kvyard as a plain `pip install` makes it, with the hot modules compiled, under the tests that hold those.
#
# Called by .ci/run, through `make test-compiled`. All packages
# are run compiled by `make test ARGS='-m slow tests/test_compiled.py'`, which takes much longer.
set -euo pipefail
cd "$(dirname "$0")/.."
exec </dev/null
export CI="${CI:-true}"
python="$(pwd)/${VENV:-.venv}/bin/python"

made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
target=$made/plain
KVYARD_COMPILE=1 "$python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --target "$target" .

# What compiles to another report is found first: to the byte, on a part of the demo's trace.
KVYARD_PLAIN="$target" "$python" -m pytest -q -p no:cacheprovider -m slow tests/test_compiled.py -k same_to_the_byte

# Golden logs of blocks and schedulers, hashes, rows and scores of the index, every policy: what is compiled has tests here.
PYTHONPATH="$target" "$python" -m pytest -q -p no:cacheprovider -n "${WORKERS:-2}" \
    tests/hashing tests/events/wire tests/events/test_batcher.py tests/blocks tests/lab/conform/test_scheduler.py tests/lab/conform/test_sglang.py tests/engine/test_core_plans.py tests/index/test_scorer_agreement.py tests/index/test_runs.py tests/router
