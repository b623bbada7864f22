"""``kvyard doctor http://...``: mock engines with something wrong, each on purpose, and it has to say what."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq", reason="needs pyzmq: pip install kvyard[zmq]")
pytest.importorskip("httptools", reason="needs kvyard[server]")
pytest.importorskip("tokenizers", reason="needs kvyard[tokenizers]")

from tests.cli.test_doctor import Seen, see
from tests.ports import free_ports
from tests.server.doctor.tampered import Tampered
from tests.server.mock.support import LOOPBACK, Served

from kvyard.cli.app import main
from kvyard.errors import KvyardError
from kvyard.server.doctor.template import rendered

pytestmark = pytest.mark.zmq

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def engine() -> Iterator[Served]:
    with Served(hash_seed="0", events_endpoint=LOOPBACK, replay_endpoint=LOOPBACK) as served:
        yield served


def write_tokenizer(path: Path, letters: str) -> str:
    """A tokenizer of letters, numbered as they come, with a first token of its own."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

    vocabulary = {"<bos>": 0, "<unk>": 1, **{letter: at for at, letter in enumerate(letters, 2)}}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    made.save(str(path))
    return str(path)


LETTERS = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789<>|_.,"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json", LETTERS)


@pytest.fixture(scope="module")
def letters(tokenizer: str) -> Iterator[Served]:
    """An engine with that tokenizer."""
    with Served(tokenizer=tokenizer) as served:
        yield served


def look(capsys: pytest.CaptureFixture[str], *argv: str) -> Seen:
    return Seen(capsys, argv)


# -- nothing is broken ----------------------------------------------------------------------------------------------


def test_nothing_is_broken(capsys, engine: Served) -> None:
    seen = look(capsys, engine.url, "--model", "mock", "--block-size", "16")
    assert seen.code == 0 and not seen.broken, seen.all
    (visit,) = seen.all["engines"]
    assert visit["models"] == ["mock"] and visit["max_model_len"] == 2048 and visit["health"] == 200
    assert visit["cache"]["block_size"] == "16" and visit["round_trip_ms"] > 0 and abs(visit["skew_s"]) < 30
    first, second, salted = visit["cached"]
    assert (first, salted) == (0, 0) and second == (visit["prompt_tokens"] - 1) // 16 * 16 >= 48
    assert visit["hits"] == second and not visit["failed"]
    assert visit["chat_tokens"] == len(visit["chat_ids"]) > 0


def test_for_people(capsys, engine: Served) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["doctor", engine.url])
    out = capsys.readouterr().out
    assert exit_.value.code == 0 and out.endswith("Nothing is broken.\n")
    assert (
        f"{engine.url}: mock, kvyard-" in out and "blocks of 16" in out and "when they were sent a second time" in out
    )


def test_with_its_events(capsys, engine: Served) -> None:
    (state,) = engine.get("/admin/workers")
    argv = (engine.url, state["streams"][0]["endpoint"], "--replay", state["streams"][0]["replay_endpoint"])
    seen = see(capsys, *argv, "--algorithm", "sha256_cbor", "--seed", "0", until=lambda seen: not seen.broken)
    assert seen.code == 0 and not seen.findings.keys() & {"unannounced", "crossed"}
    assert seen.says("hashes", "sha256_cbor with seed '0'")


def test_without_requests(capsys, engine: Served) -> None:
    before = engine.metrics()
    seen = look(capsys, engine.url, "--no-probe")
    after = engine.metrics()
    assert seen.code == 0 and seen.all["engines"][0]["cached"] == []
    name = 'vllm:prompt_tokens_total{engine="0",model_name="mock"}'
    assert before[name] == after[name]


# -- each thing that can be wrong -------------------------------------------------------------------------------------


def test_nobody_answers(capsys) -> None:
    seen = look(capsys, f"http://127.0.0.1:{free_ports(1)}")
    assert seen.code == 1 and set(seen.findings) == {"http-unreachable"}


@pytest.mark.parametrize(
    "url", ["http://", "http://[half", "http://host:99999999", "http://a b", "http://é" + "x" * 300]
)
def test_an_address_that_is_none(capsys, url: str) -> None:
    assert set(look(capsys, url).findings) == {"http-unreachable"}


@pytest.mark.parametrize(
    "said", [[], {}, {"data": 3}, {"data": [{"id": 5}]}, {"tokens": ["x"], "usage": {"prompt_tokens": None}}, "", 7]
)
def test_somebody_who_talks_nonsense(capsys, engine: Served, said: Any) -> None:
    """Whatever is said instead of an answer, it is no reason to fall over."""
    with Tampered(engine.url, answer=lambda path, body: {"nonsense": said} if said == 7 else said or {"": ""}) as proxy:
        seen = look(capsys, proxy.url)
        assert seen.code in (0, 1) and seen.all["engines"][0]["health"] == 200


def test_metrics_that_are_none(capsys, engine: Served) -> None:
    with Tampered(engine.url, page=lambda text: "vllm:cache_config_info{block_size=} \x00 {") as proxy:
        assert look(capsys, proxy.url, "--no-probe").code == 0


def test_a_key_is_needed(capsys, tmp_path: Path) -> None:
    with Served(token="secret") as served:
        seen = look(capsys, served.url)
        assert seen.code == 1 and set(seen.findings) == {"token"}
        (tmp_path / "key").write_text("secret\n")
        assert look(capsys, served.url, "--token-file", str(tmp_path / "key")).code == 0


def test_an_engine_that_is_not_ready(capsys, engine: Served) -> None:
    with Tampered(engine.url, statuses={"/health": 503}) as proxy:
        seen = look(capsys, proxy.url)
        assert seen.broken == {"unhealthy"} and seen.says("unhealthy", "503")


def test_another_model(capsys, engine: Served) -> None:
    seen = look(capsys, engine.url, "--model", "llama")
    assert seen.broken == {"model"} and seen.says("model", "'mock'; 'llama' is expected")


def test_another_block_size_by_metrics_and_without_them(capsys, engine: Served) -> None:
    seen = look(capsys, engine.url, "--block-size", "64")
    assert seen.broken == {"block-size"} and seen.says("block-size", "metrics say blocks of 16 tokens; 64")
    with Tampered(engine.url, page=lambda text: "") as proxy:
        assert look(capsys, proxy.url, "--block-size", "16").code == 0
        seen = look(capsys, proxy.url, "--block-size", "64")
        assert seen.broken == {"block-size"} and seen.says("block-size", "not what blocks of 64 would give")


def test_blocks_that_are_larger_than_the_usual_prompt(capsys) -> None:
    with Served(engine={"block_size": 1024, "num_gpu_blocks": 64, "max_model_len": 40_000}) as served:
        seen = look(capsys, served.url)
        assert seen.code == 0 and seen.all["engines"][0]["cached"][1] >= 1024
        with Tampered(served.url, page=lambda text: "") as proxy:  # nobody says how large
            assert look(capsys, proxy.url).says("caching-off", "give --block-size", "fix")
            assert look(capsys, proxy.url, "--block-size", "1024").code == 0


def test_ranks_behind_one_address(capsys) -> None:
    with Served(dp_size=3, events_endpoint=LOOPBACK, replay_endpoint=LOOPBACK) as served:
        (state,) = served.get("/admin/workers")
        seen = see(capsys, served.url, state["streams"][0]["endpoint"], until=lambda seen: not seen.broken)
        assert seen.all["engines"][0]["ranks"] == 3 and seen.all["engines"][0]["cached"][1] > 0

        def elsewhere(path: str, body: dict[str, Any]) -> None:
            asked.append(path)

        asked: list[str] = []
        with Tampered(served.url, request=elsewhere) as proxy:  # which loses the header that chooses a rank
            assert look(capsys, proxy.url).code == 0
        assert 4 <= asked.count("/v1/completions") <= 9


def test_prefix_caching_is_off(capsys) -> None:
    with Served(engine={"enable_prefix_caching": False}) as served:
        seen = look(capsys, served.url)
        assert seen.broken == {"caching-off"} and seen.says("caching-off", "enable_prefix_caching=False")
        with Tampered(served.url, page=lambda text: text.replace("cache_config", "other")) as proxy:
            assert look(capsys, proxy.url).says("caching-off", "computed twice")


def test_cached_tokens_are_not_reported(capsys, engine: Served) -> None:
    def silent(path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        if "usage" in body:
            body["usage"]["prompt_tokens_details"] = None
            return body
        return None

    with Tampered(engine.url, answer=silent) as proxy:
        seen = look(capsys, proxy.url)
        assert seen.code == 0 and seen.says("no-cached-tokens", "tokens the second time")


def test_salts_are_ignored(capsys, engine: Served) -> None:
    def bare(path: str, body: dict[str, Any]) -> dict[str, Any]:
        body.pop("cache_salt", None)
        return body

    with Tampered(engine.url, request=bare) as proxy:
        seen = look(capsys, proxy.url)
        assert seen.broken == {"salt-ignored"}


def test_the_tokenizer_is_the_same_another_or_adds_a_first_token(
    capsys, letters: Served, tokenizer: str, tmp_path: Path
) -> None:
    assert look(capsys, letters.url, "--tokenizer", tokenizer).code == 0
    assert look(capsys, letters.url, "--tokenizer", tokenizer, "--no-special").broken == {"first-token"}
    other = write_tokenizer(tmp_path / "other.json", LETTERS[::-1])
    seen = look(capsys, letters.url, "--tokenizer", other)
    assert seen.broken == {"tokenizer"} and seen.says("tokenizer", "at token 1.")


def test_the_template_is_the_same_or_another(capsys, letters: Served, tokenizer: str, tmp_path: Path) -> None:
    (tmp_path / "same.jinja").write_text(CHATML)
    (tmp_path / "other.json").write_text(
        json.dumps({"chat_template": "{{ bos_token }}" + CHATML, "bos_token": {"content": "a"}})
    )
    (tmp_path / "chat.json").write_text(json.dumps({"messages": [{"role": "user", "content": "my own words"}]}))
    argv = (letters.url, "--tokenizer", tokenizer)
    assert look(capsys, *argv, "--template", str(tmp_path / "same.jinja")).code == 0
    chat = ("--messages-file", str(tmp_path / "chat.json"))
    seen = look(capsys, *argv, "--template", str(tmp_path / "same.jinja"), *chat)
    assert seen.code == 0 and len(seen.all["engines"][0]["chat_ids"]) < 100
    seen = look(capsys, *argv, "--template", str(tmp_path / "other.json"))
    assert seen.broken == {"template"} and seen.says("template", "at token 0.")


def test_chats_are_rendered_otherwise_than_tokenize_says(capsys, engine: Served) -> None:
    def longer(path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        if path == "/v1/chat/completions":
            body["messages"].insert(0, {"role": "system", "content": "A default of the server's."})
            return body
        return None

    with Tampered(engine.url, request=longer) as proxy:
        seen = look(capsys, proxy.url)
        assert seen.broken == {"template"} and seen.says("template", "and a chat completion")


def test_requests_are_refused(capsys, engine: Served) -> None:
    with Tampered(engine.url, statuses={"/v1/completions": 500, "/v1/chat/completions": 400}) as proxy:
        seen = look(capsys, proxy.url)
        assert seen.code == 1
        assert [(one["code"], one["broken"]) for one in seen.all["findings"]] == [
            ("no-answer", True),
            ("no-answer", False),
        ]


def test_there_is_no_tokenize(capsys, engine: Served) -> None:
    with Tampered(engine.url, statuses={"/tokenize": 404}) as proxy:
        seen = look(capsys, proxy.url)
        assert seen.code == 0 and seen.says("no-tokenize", "404")
        assert seen.all["engines"][0]["cached"][1] > 0  # by text, then


def test_a_distant_engine_and_a_wrong_clock(capsys, engine: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvyard.server.doctor.engine_rules.FAR_MS", 0.0)
    with Tampered(engine.url, headers={"Date": "Sat, 01 Jan 2050 00:00:00 GMT"}) as proxy:
        seen = look(capsys, proxy.url, "--no-probe")
        assert seen.code == 0 and seen.says("clock", "s ahead of") and seen.says("far")
    with Tampered(engine.url, headers={"Date": "Sat, 01 Jan 2000 00:00:00 GMT"}) as proxy:
        assert look(capsys, proxy.url, "--no-probe").says("clock", "s behind")
    with Tampered(engine.url, headers={"Date": "nonsense"}) as proxy:
        assert not look(capsys, proxy.url, "--no-probe").says("clock")


def test_engines_that_differ(capsys, engine: Served, letters: Served) -> None:
    with Served(engine={"block_size": 32, "max_model_len": 1024}, served_model_name="other") as other:
        seen = look(capsys, engine.url, other.url)
        assert seen.broken == {"models-differ", "block-sizes-differ", "lengths-differ"}
        assert all(finding["where"] == other.url for finding in seen.all["findings"])
    seen = look(capsys, engine.url, letters.url)
    assert seen.broken == {"tokenizers-differ", "templates-differ"}


def test_events_of_others_none_at_all_and_in_the_wrong_order(capsys, engine: Served) -> None:
    with Served(workers=2, events_endpoint=LOOPBACK, replay_endpoint=LOOPBACK) as pair:
        streams = [state["streams"][0]["endpoint"] for state in pair.get("/admin/workers")]
        seen = see(capsys, *pair.urls, *streams, until=lambda seen: not seen.broken - {"stale"})
        assert seen.says("seeds-differ")  # the same prompt, two hashes
        seen = see(capsys, *pair.urls, *reversed(streams), until=lambda seen: seen.says("crossed"))
        assert len([one for one in seen.all["findings"] if one["code"] == "crossed"]) == 2
        seen = see(capsys, engine.url, streams[0], until=lambda seen: seen.says("unannounced", "none of the 1 streams"))
        assert "unannounced" in seen.broken


def test_more_is_announced_than_the_device_has(capsys, engine: Served) -> None:
    few = lambda page: re.sub(r'num_gpu_blocks="\d+"', 'num_gpu_blocks="3"', page)  # noqa: E731
    stream, *_ = (state["streams"][0] for state in engine.get("/admin/workers"))
    argv = [stream["endpoint"], "--replay", stream["replay_endpoint"]]
    with Tampered(engine.url, page=few) as proxy:
        seen = see(capsys, proxy.url, *argv, until=lambda seen: seen.says("over-capacity", " of 2."))
        assert seen.code == 1 and "over-capacity" in seen.broken
    assert not see(capsys, engine.url, *argv, until=lambda seen: not seen.broken).says("over-capacity")


def test_a_leak_before_the_doctor_came_shows_in_what_it_fetches(capsys) -> None:
    with Served(engine={"num_gpu_blocks": 200}, events_endpoint=LOOPBACK, replay_endpoint=LOOPBACK) as served:
        served.post("/admin/faults", never_removes=True)
        for letter in "abcdefghijkl":
            served.complete(letter * 320)
        (state,) = served.get("/admin/workers")
        argv = [served.url, state["streams"][0]["endpoint"], "--replay", state["streams"][0]["replay_endpoint"]]
        seen = see(capsys, *argv, until=lambda seen: seen.says("over-capacity", " of 200."))
        assert seen.code == 1 and seen.broken == {"over-capacity"}
        assert seen.all["device_blocks"] == {argv[1]: 200}


def test_without_a_probe_streams_are_matched_to_engines_by_order(capsys, engine: Served) -> None:
    (state,) = engine.get("/admin/workers")
    engine.complete("c" * 64)
    argv = [engine.url, state["streams"][0]["endpoint"], "--replay", state["streams"][0]["replay_endpoint"]]
    seen = look(capsys, *argv, "--no-probe", "--seconds", "0.25")
    assert seen.all["device_blocks"] == {argv[1]: int(seen.all["engines"][0]["cache"]["num_gpu_blocks"]) - 1}
    assert look(capsys, *argv[1:], "--seconds", "0.25").all["device_blocks"] == {}


def test_wrong_use(capsys, tmp_path: Path, engine: Served) -> None:
    (tmp_path / "t.jinja").write_text("{{ raise_exception('no such role') }}")
    (tmp_path / "t.json").write_text("{}")
    (tmp_path / "m.json").write_text("3")
    for argv, words in (
        (["recording.kve", "--model", "m"], "are about engines at http"),
        ([engine.url, "--template", str(tmp_path / "t.jinja")], "--template needs --tokenizer"),
        ([engine.url, "--messages-file", str(tmp_path / "m.json")], "holds no chat"),
        ([engine.url, "--messages-file", str(tmp_path / "none.json")], "can't read"),
        ([engine.url, "--token-file", str(tmp_path / "none")], "can't read the token"),
    ):
        with pytest.raises(SystemExit) as exit_:
            main(["doctor", *argv])
        assert exit_.value.code == 2 and words in capsys.readouterr().err
    for name, words in (("t.jinja", "no such role"), ("t.json", "no chat_template"), ("none.jinja", "can't read")):
        with pytest.raises(KvyardError, match=words):
            rendered(tmp_path / name, [])
