#!/usr/bin/env bash
# Runs the tests of the HTTP seam and of the command line with the lowest and with the newest allowed versions of what we depend on
# directly, each in an environment of its own below build/versions. Half a minute of CPU, environments included.
#
#   scripts/test-versions.sh                 makes the environments where that is due, and runs the tests
#   scripts/test-versions.sh environments    only makes them
set -euo pipefail
cd "$(dirname "$0")/.."
tools=build/versions/tools
[ -x "$tools/bin/uv" ] || { "${PYTHON:-python3}" -m venv "$tools"; "$tools/bin/python" -m pip install --quiet --disable-pip-version-check uv; }
for resolution in lowest-direct highest; do
    env=build/versions/$resolution
    [ -x "$env/bin/python" ] || "${PYTHON:-python3}" -m venv "$env"
    # What the tests themselves need isn't ours to bound, and so isn't resolved downwards.
    "$tools/bin/uv" pip install --quiet --python "$env/bin/python" --resolution "$resolution" --editable '.[server,zmq]'
    "$tools/bin/uv" pip install --quiet --python "$env/bin/python" httpx hypothesis pytest pytest-timeout
done
[ "${1:-}" != environments ] || exit 0
for resolution in lowest-direct highest; do
    env=build/versions/$resolution
    echo "$resolution: $("$tools/bin/uv" pip list --python "$env/bin/python" 2>/dev/null | awk '/^(aiohttp|httptools|msgspec|typer|pyzmq) /{printf "%s %s  ", $1, $2}')"
    "$env/bin/python" -m pytest -q -p no:cacheprovider tests/server/test_connection.py tests/server/test_http.py tests/server/test_running.py \
        tests/server/test_transports.py tests/server/gateway/test_exchange.py tests/server/gateway/test_connections.py tests/cli/test_app.py
done
