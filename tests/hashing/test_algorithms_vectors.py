"""Our keys are the bytes that a real vLLM computed (``vectors.json``, see ``record_vectors.py``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvyard.hashing import Embeds, Media, Namespace, TokenChain, algorithm, wire_hash

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "vectors.json").read_text())
VLLM = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")

Case = dict[str, Any]


def namespace(case: Case, tagged: bool = True) -> Namespace:
    lora = case.get("lora") or {"name": None, "path": "", "id": None}
    embeds = case.get("embeds")
    return Namespace(
        lora_name=lora["name"],
        lora_path=lora["path"],
        lora_id=lora["id"],
        salt=case.get("salt"),
        media=tuple(Media(**item) for item in case.get("media", ())),
        embeds=Embeds(bytes.fromhex(embeds["data"]), embeds["bytes_per_token"]) if embeds else None,
        tagged=tagged,
    )


def chain_of(case: Case, name: str, tagged: bool = True) -> TokenChain:
    seed = RECORDED["xx_seed"] if name.startswith("xx") else None
    tokens = case.get("tokens") or case["cycle"] * case["times"]
    chain = TokenChain(tokens, case["block_size"], algorithm(name, seed, {}), namespace(case, tagged))
    for chunk in case.get("appended", ()):
        chain.append(chunk)
    return chain


def hexes(keys: list[int | bytes]) -> list[str]:
    return [key.hex() for key in keys if isinstance(key, bytes)]


def plain_json(value: object) -> object:
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    return [plain_json(item) for item in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("name", VLLM)
@pytest.mark.parametrize("case", RECORDED["cases"], ids=lambda case: case["name"])
def test_hashes(case: Case, name: str) -> None:
    assert hexes(chain_of(case, name).keys) == case["hashes"][name]
    assert hexes(chain_of(case, name, tagged=False).keys) == case["bare_hashes"][name]


@pytest.mark.parametrize("case", RECORDED["cases"], ids=lambda case: case["name"])
def test_extra_keys(case: Case) -> None:
    chain = chain_of(case, "sha256_cbor")
    last = len(chain.keys)
    assert plain_json(chain.namespace.extras(0, last, chain.block_size) or [None] * last) == case["extras"]
    assert plain_json(chain.extras_of(0, last)) == (case["wire_extras"] or [])


@pytest.mark.parametrize("root", RECORDED["roots"], ids=lambda root: f"{root['algorithm']}-{root['seed']}")
def test_roots(root: dict[str, str | None]) -> None:
    name, seed = root["algorithm"], root["seed"]
    assert name is not None
    environ = {} if seed is None else {"PYTHONHASHSEED": seed}
    assert algorithm(name, None, environ).root == bytes.fromhex(root["root"] or "")
    assert algorithm(name, seed, {}).root == bytes.fromhex(root["root"] or "")


@pytest.mark.parametrize("recorded", RECORDED["shared"], ids=lambda recorded: recorded["algorithm"])
def test_equal_texts_count_as_two_objects(recorded: dict[str, Any]) -> None:
    """vLLM's pickled hash depends on whether two equal texts are one object. Ours never does, and takes its usual way."""
    name = recorded["algorithm"]
    assert (recorded["one_object"] == recorded["two_objects"]) == (name == "sha256_cbor")
    assert hexes(chain_of(recorded["case"], name).keys) == [recorded["two_objects"]]
    text = "img-a"
    one_object = Namespace(media=(Media(text, 0, 1), Media(text, 2, 1)))
    chain = TokenChain([1, 2, 3, 4], 4, algorithm(name, environ={}), one_object)
    assert hexes(chain.keys) == [recorded["two_objects"]]


def test_the_vectors_of_the_reference() -> None:
    cbor, pickled = algorithm("sha256_cbor", environ={}), algorithm("sha256", environ={})
    assert cbor.root == bytes.fromhex("9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0")
    assert pickled.root == bytes.fromhex("066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198")
    keys = cbor.hash_blocks(None, [1, 2, 3, 4, 5, 6, 7, 8], 4)
    assert hexes(keys) == [
        "58d0879dff3800f65f8c5fd449d73048c0f7699dd238a03b84b146b151d55111",
        "e1bc29393a2da9fd798f35ff04d215f846aee6df4b803ce3d43b57df56b58fb1",
    ]
    assert wire_hash(keys[0]) == 9561501211280363793
    assert hexes(pickled.hash_blocks(None, [1, 2, 3, 4], 4)) == [
        "52a7f141c60918f65779927090482b5a24adbe68c8613a211a1eb4e3edd9361a"
    ]


def test_the_sample_event_of_the_reference() -> None:
    keys = algorithm("sha256_cbor", environ={}).hash_blocks(None, [0] * 16 + [1] * 16 + [2] * 16, 16)
    assert [wire_hash(key) for key in keys] == [6544372511597843651, 15647262378301297500, 9723504175580119692]


@pytest.mark.parametrize(
    ("tagged", "front", "back"), [(False, "3572f8b4", "f295"), (True, "0e172de9", "3cae")], ids=["August", "0.32"]
)
def test_the_salted_block_of_the_reference(tagged: bool, front: str, back: str) -> None:
    salted = Namespace(salt="tenant-a", tagged=tagged)
    (key,) = hexes(TokenChain([1, 2, 3, 4], 4, algorithm("sha256_cbor", environ={}), salted).keys)
    assert key.startswith(front)
    assert key.endswith(back)
