#!/usr/bin/env bash
# Runs the tests that start real engines and proxies. Each suite gets its environment in build/peers, made the first time.
#
#     scripts/test-real.sh                tests/real and tests/vllm: a vLLM on CPU
#     scripts/test-real.sh envoy          a suite by its name, and what pytest is to be told beside it: envoy -k subset, or
#                                         files: sglang tests/real/sglang/test_expect.py
#     scripts/test-real.sh vllm-suite     vLLM's own tests with kvyard's scheduler and manager; --connectors and --http run others
#     scripts/test-real.sh tests/real/test_gateway.py
#
# Suites: envoy, nixl, sglang. KVYARD_VLLM_PYTHON, KVYARD_SGLANG_PYTHON, KVYARD_ENVOY and KVYARD_NIXL (a folder) name what was made elsewhere. One process, so that tests share engines.
set -euo pipefail
cd "$(dirname "$0")/.."

peer() { # variable, path below build/peers, peers that make it
    local variable="$1" path="build/peers/$2"
    shift 2
    [ -n "${!variable:-}" ] || { scripts/peers.sh "$@"; export "$variable=$path"; }
}

tests() { # marker, folder, what pytest is to be told; tests named there run instead of the folder's
    local marker="$1" folder="$2" argument
    shift 2
    for argument in "$@"; do
        [ ! -e "${argument%%::*}" ] || folder=
    done
    exec .venv/bin/python -m pytest -m "$marker" ${folder:+"$folder"} "$@"
}

suite="${1:-}"
case "$suite" in
    envoy)
        shift
        peer KVYARD_ENVOY envoy/bin/envoy envoy
        tests envoy tests/real/envoy "$@"
        ;;
    nixl)
        shift
        peer KVYARD_VLLM_PYTHON vllm/bin/python vllm
        peer KVYARD_NIXL nixl nixl
        tests nixl tests/real/nixl "$@"
        ;;
    sglang)
        shift
        peer KVYARD_SGLANG_PYTHON sglang/bin/python sglang
        tests sglang tests/real/sglang "$@"
        ;;
    vllm-suite)
        shift
        peer KVYARD_VLLM_PYTHON vllm/bin/python vllm-suite
        exec "$KVYARD_VLLM_PYTHON" scripts/vllm_suite/run.py "$@"
        ;;
    *)
        peer KVYARD_VLLM_PYTHON vllm/bin/python vllm
        [ $# -gt 0 ] || set -- tests/real tests/vllm
        exec .venv/bin/python -m pytest -m vllm "$@"
        ;;
esac
