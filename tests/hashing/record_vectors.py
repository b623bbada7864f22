"""Record ``vectors.json``: block hashes that a real vLLM gives, for our algorithms to agree with.

Run it with an interpreter that has vLLM 0.32 and xxhash, from the repository root:

    python tests/hashing/record_vectors.py > tests/hashing/vectors.json

vLLM (https://github.com/vllm-project/vllm) is licensed under Apache-2.0. Nothing of it is copied here: this script calls
its public functions, and the file holds what they returned.
"""

import json
import os
import random
import sys

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Imports may print; keep them off the recording.
_stdout = os.dup(1)
os.dup2(2, 1)

import torch  # noqa: E402
import vllm  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import get_hash_fn_by_name  # noqa: E402
from vllm.v1.core import kv_cache_utils  # noqa: E402
from vllm.v1.request import Request  # noqa: E402

ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
SEED = "7"
"""For the two that draw a random seed otherwise."""


def own(text):
    """An object of its own, as text decoded off a wire is."""
    return text if text is None else text.encode().decode()


def make_request(case, hasher, shared=False):
    fresh = (lambda text: text) if shared else own
    lora = case.get("lora")
    embeds = case.get("embeds")
    tokens = case.get("tokens") or case["cycle"] * case["times"]
    tensor = None
    if embeds:
        rows = torch.frombuffer(bytearray.fromhex(embeds["data"]), dtype=torch.uint8)
        tensor = rows.view(-1, embeds["bytes_per_token"]).view(torch.float32)
        tokens = None
    request = Request(
        request_id="0",
        prompt_token_ids=tokens and list(tokens),
        sampling_params=SamplingParams(max_tokens=8),
        pooling_params=None,
        prompt_embeds=tensor,
        mm_features=[
            MultiModalFeatureSpec(
                data=MultiModalKwargsItem.dummy(),
                modality="image",
                identifier=fresh(item["hash"]),
                mm_position=PlaceholderRange(offset=item["offset"], length=item["length"]),
            )
            for item in case.get("media", ())
        ],
        lora_request=LoRARequest(fresh(lora["name"]), lora["id"], fresh(lora["path"])) if lora else None,
        cache_salt=fresh(case.get("salt")),
        block_hasher=hasher,
    )
    for chunk in case.get("appended", ()):
        request.append_output_token_ids(list(chunk))
    return request


def jsonable(value):
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    return value


def extras_of(request, size):
    found, at = [], 0
    for block in range(request.num_tokens // size):
        keys, at = kv_cache_utils.generate_block_hash_extra_keys(request, block * size, (block + 1) * size, at)
        found.append(keys)
    return found


def start(name, seed=None):
    if seed is None:
        os.environ.pop("PYTHONHASHSEED", None)
    else:
        os.environ["PYTHONHASHSEED"] = seed
    function = get_hash_fn_by_name(name)
    kv_cache_utils.init_none_hash(function)
    return function


def record(case):
    size = case["block_size"]
    case["hashes"], case["bare_hashes"] = {}, {}
    for name in ALGORITHMS:
        function = start(name, SEED if name.startswith("xx") else None)
        request = make_request(case, kv_cache_utils.get_request_block_hasher(size, function))
        case["hashes"][name] = [key.hex() for key in request.block_hashes]
        extras = extras_of(request, size)
        bare = kv_cache_utils.to_event_extra_keys(extras)
        case["extras"], case["wire_extras"] = jsonable(extras), jsonable(bare)
        # The form of versions before 0.32, which hashed what events still carry.
        parent, chain = None, []
        for block, extra in enumerate(bare or ()):
            tokens = request.all_token_ids[block * size : (block + 1) * size]
            parent = kv_cache_utils.hash_block_tokens(function, parent, tokens, extra)
            chain.append(parent.hex())
        case["bare_hashes"][name] = chain
    return case


def media(*items):
    return [{"hash": text, "offset": offset, "length": length} for text, offset, length in items]


def written_cases():
    tokens = list(range(1000, 1000 + 22))
    lora = {"name": "sql-adapter", "path": "/adapters/sql", "id": 3}
    wide = [0, 23, 24, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1, 300, 300, 300]
    yield "plain", {"tokens": [1, 2, 3, 4, 5, 6, 7, 8, 9]}
    yield "too short", {"tokens": [1, 2, 3]}
    yield "every integer width", {"tokens": wide}
    yield "grown", {"tokens": tokens, "appended": [[1], [2, 3, 4], [5] * 9, [6]]}
    yield "block of one", {"tokens": [5, 70000, 5], "block_size": 1}
    yield "block of two", {"tokens": [5, 70000, 5, 6], "block_size": 2}
    yield "block of three", {"tokens": [5, 70000, 5, 6, 7, 8], "block_size": 3}
    yield "blocks of 24", {"tokens": list(range(48)), "block_size": 24}
    yield "blocks of 300", {"tokens": list(range(600)), "block_size": 300}
    yield "blocks beyond a pickle frame", {"cycle": [3, 70000, 2**20], "times": 16000, "block_size": 24000}
    yield "lora", {"tokens": tokens, "lora": lora}
    yield "salt", {"tokens": tokens, "salt": "tenant-a"}
    yield "salt of August", {"tokens": [1, 2, 3, 4], "salt": "tenant-a"}
    yield "empty salt", {"tokens": tokens, "salt": ""}
    yield "salt spelled like a tag", {"tokens": tokens, "salt": "mm", "media": media(("h", 1, 2))}
    yield "text beyond ASCII", {"tokens": tokens, "salt": "prüfung-鍵", "lora": {"name": "é", "path": "/ü", "id": 1}}
    yield "name and path alike", {"tokens": tokens, "lora": {"name": "same-text", "path": "same-text", "id": 1}}
    yield "item inside one block", {"tokens": tokens, "media": media(("img-a", 5, 2))}
    yield "item over several blocks", {"tokens": tokens, "media": media(("img-a", 2, 11))}
    yield "item ends with a block", {"tokens": tokens, "media": media(("img-a", 2, 6))}
    yield "item starts with a block", {"tokens": tokens, "media": media(("img-a", 4, 3))}
    yield "item fills a block", {"tokens": tokens, "media": media(("img-a", 8, 4))}
    yield "two items in a block", {"tokens": tokens, "media": media(("img-a", 4, 1), ("img-b", 6, 1))}
    yield "two items touch", {"tokens": tokens, "media": media(("img-a", 1, 5), ("img-b", 6, 7))}
    yield "same item twice in a block", {"tokens": tokens, "media": media(("img-a", 4, 1), ("img-a", 6, 1))}
    yield "item past the last full block", {"tokens": tokens, "media": media(("img-a", 20, 2))}
    yield (
        "grown inside an item",
        {"tokens": tokens, "media": media(("img-a", 3, 2), ("img-b", 18, 9)), "appended": [[7, 7], [8] * 6]},
    )
    yield "all but embeds", {"tokens": tokens, "lora": lora, "salt": "s1", "media": media(("i", 0, 2), ("j", 3, 9))}
    rows = bytes(random.Random(5).randrange(256) for _ in range(10 * 8)).hex()
    embeds = {"data": rows, "bytes_per_token": 8}
    yield "embeds", {"tokens": [0] * 10, "embeds": embeds}
    yield "embeds, grown past them", {"tokens": [0] * 10, "embeds": embeds, "appended": [[4] * 3, [5] * 8]}
    yield (
        "everything",
        {
            "tokens": [0] * 10,
            "embeds": embeds,
            "lora": lora,
            "salt": "s2",
            "media": media(("i", 1, 5)),
            "appended": [[9] * 4],
        },
    )


def random_cases(count):
    dice = random.Random(20)
    for number in range(count):
        size = dice.choice((1, 2, 3, 4, 4, 5, 8, 16))
        length = dice.randrange(size * 7 + 1) + 1
        case = {"block_size": size, "tokens": [dice.choice((3, 300, 70000, 2**20)) for _ in range(length)]}
        items, at = [], 0
        while dice.random() < 0.7 and at < length:
            at += dice.randrange(size + 2)
            items.append((dice.choice(("img-a", "img-b", "ф")), at, 1 + dice.randrange(2 * size)))
            at += items[-1][2]
        case["media"] = media(*items)
        if dice.random() < 0.3:
            case["salt"] = dice.choice(("tenant-a", "t", "img-a"))
        if dice.random() < 0.3:
            case["lora"] = {"name": dice.choice(("a", "tenant-a")), "path": "/adapter", "id": 1}
        case["appended"] = [[dice.randrange(1000) for _ in range(dice.randrange(9))] for _ in range(dice.randrange(4))]
        yield f"random {number}", case


def shared_cases():
    """Return the cases with equal texts as one object: where pickled hashes go a way of their own."""
    case = {"block_size": 4, "tokens": [1, 2, 3, 4], "media": media(("img-a", 0, 1), ("img-a", 2, 1))}
    text = case["media"][0]["hash"]
    case["media"][1]["hash"] = text
    for name in ("sha256", "sha256_cbor"):
        hasher = kv_cache_utils.get_request_block_hasher(4, start(name))
        yield {
            "algorithm": name,
            "case": case,
            "one_object": make_request(case, hasher, shared=True).block_hashes[0].hex(),
            "two_objects": make_request(case, hasher).block_hashes[0].hex(),
        }


def roots():
    for name in ALGORITHMS:
        for seed in (None, "", "0", "42", "random", "ключ"):
            if seed is None and name.startswith("xx"):
                continue
            start(name, seed)
            yield {"algorithm": name, "seed": seed, "root": kv_cache_utils.NONE_HASH.hex()}


def main():
    cases = [record({"name": name, "block_size": 4, **case}) for name, case in (*written_cases(), *random_cases(40))]
    recording = {
        "source": f"vLLM {vllm.__version__} (Apache-2.0) on CPython {sys.version.split()[0]}, by record_vectors.py",
        "xx_seed": SEED,
        "roots": list(roots()),
        "cases": cases,
        "shared": list(shared_cases()),
    }
    sys.stdout.flush()
    os.dup2(_stdout, 1)
    print("{")
    for field, value in recording.items():
        ending = "" if field == "shared" else ","
        if isinstance(value, list):
            rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in value)
            print(f'"{field}": [\n{rows}\n]{ending}')
        else:
            print(f'"{field}": {json.dumps(value)}{ending}')
    print("}")


if __name__ == "__main__":
    main()
