#!/usr/bin/env bash
# Rewrites requirements.lock from pyproject.toml: the extras `all` and `otel` and the dev group, for all platforms and Pythons from 3.11 on.
# What `all` leaves out is large or changes results by being there; tests that need it make an environment of their own.
#
# Pins are kept where they still fit; `scripts/lock.sh --upgrade` moves them all. The resolver lives in a throwaway venv and
# is told to write neither index addresses nor local paths, so that the lock is the same wherever it was made.
set -euo pipefail
cd "$(dirname "$0")/.."

tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
"${PYTHON:-python3}" -m venv "$tools"
"$tools/bin/python" -m pip install --quiet --disable-pip-version-check uv

UV_CUSTOM_COMPILE_COMMAND="scripts/lock.sh" "$tools/bin/uv" pip compile pyproject.toml \
    --quiet --universal --python-version 3.11 --extra all --extra otel --group dev \
    --no-emit-index-url --no-emit-find-links \
    --output-file requirements.lock "$@" >/dev/null
