#!/usr/bin/env bash
# Runs the tests that start real engines and proxies. Each suite gets its environment in build/peers, made the first time.
#
#     scripts/test-real.sh                tests/real and tests/vllm: a vLLM on CPU
#     scripts/test-real.sh envoy          a suite by its name, and what pytest is to be told beside it: envoy -k subset
#     scripts/test-real.sh tests/real/test_gateway.py
#
# KVYARD_VLLM_PYTHON and KVYARD_ENVOY name what was made elsewhere. One process, so that tests share engines.
set -euo pipefail
cd "$(dirname "$0")/.."

peer() { # variable, path below build/peers, peers that make it
    local variable="$1" path="build/peers/$2"
    shift 2
    [ -n "${!variable:-}" ] || { scripts/peers.sh "$@"; export "$variable=$path"; }
}

suite="${1:-}"
case "$suite" in
    envoy)
        shift
        peer KVYARD_ENVOY envoy/bin/envoy envoy
        exec .venv/bin/python -m pytest -m envoy tests/real/envoy "$@"
        ;;
    *)
        peer KVYARD_VLLM_PYTHON vllm/bin/python vllm
        [ $# -gt 0 ] || set -- tests/real tests/vllm
        exec .venv/bin/python -m pytest -m vllm "$@"
        ;;
esac
