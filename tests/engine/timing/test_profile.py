"""The profile model: one formula twice, plans that equal passes, and the shipped profiles against their measurements."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvyard.engine.timing import ProfileTiming, make_timing
from kvyard.engine.timing.fitting import _first_guess, errors_by_kind, fit
from kvyard.engine.timing.measurements import Measurement
from kvyard.engine.timing.model import SHORT
from kvyard.engine.timing.profile import (
    NAMES,
    Coefficients,
    Features,
    Form,
    Profile,
    ProfileModel,
    base_ms,
    estimate,
    load_profile,
    pass_ms,
    shipped,
)
from kvyard.errors import KvyardError
from kvyard.lab.calibrate.passes import read_passes

DATA = Path(__file__).parent / "data"
H200 = load_profile(name="h200-llama3-8b")
MODEL = make_timing({"kind": "profile", "name": "h200-llama3-8b"}, 0)

tokens = st.integers(1, 40_000)
prompts = st.lists(st.tuples(st.integers(0, 40_000), st.integers(0, 40_000)), max_size=4)


def rows(name):
    return read_passes(DATA / name).rows


@given(prefills=prompts, batch=st.integers(0, 600), ctx=tokens)
def test_one_formula_for_one_pass_and_for_many(prefills, batch, ctx):
    of = H200.form
    many = estimate(
        [getattr(of.coefficients, name) for name in NAMES],
        Features.of([(prefills, batch, batch * ctx, ctx), ([(7, 0)], 1, 9, 9)]),
    )
    one = pass_ms(of, prefills, batch, batch * ctx, ctx)
    if one:
        assert many[0] == pytest.approx(one, rel=1e-12)
    else:
        assert not batch and not any(new for new, _ in prefills)
    assert many[1] == pytest.approx(pass_ms(of, [(7, 0)], 1, 9), rel=1e-12)


@settings(max_examples=100)
@given(
    batch=st.integers(0, 600),
    context=st.integers(0, 5_000_000),
    passes=st.sampled_from([0, 1, SHORT, SHORT + 1, 300]),
    ratios=st.tuples(st.sampled_from([1.0, 0.37, 3.0]), st.sampled_from([1.0, 1.7])),
)
def test_plans_equal_single_passes(batch, context, passes, ratios):
    config = ProfileTiming(name="h200-llama3-8b", speedup_ratio=ratios[0], decode_speedup_ratio=ratios[1])
    model = make_timing(config, 0)
    plan = model.decode_ns(batch, context, passes, 0)
    assert plan.dtype == "int64"
    assert plan.tolist() == [model.pass_ns((), batch, context + i * batch, 0) for i in range(passes)]


@given(prefills=prompts, batch=st.integers(0, 600), ctx=tokens, more=st.integers(1, 1000))
def test_more_work_never_takes_less_time(prefills, batch, ctx, more):
    now = MODEL.pass_ns(prefills, batch, batch * ctx, 0)
    assert MODEL.pass_ns([*prefills, (more, 0)], batch, batch * ctx, 0) >= now
    assert MODEL.pass_ns(prefills, batch + more, batch * ctx, 0) >= now
    assert MODEL.pass_ns(prefills, batch, batch * (ctx + more), 0) >= now
    assert (
        MODEL.pass_ns([(new, past + more) if past else (new, past) for new, past in prefills], batch, batch * ctx, 0)
        >= now
    )


NEW = (1, 7, 16, 100, 500, 900, 1000, 2048, 8192)
PAST = (1, 16, 100, 500, 900, 2048, 8192, 32768)


def obeys_physics(form: Form) -> None:
    for batch in (0, 3, 64):
        for new in NEW:
            alone = pass_ms(form, [(new, 0)], batch, batch * 500)
            assert alone >= pass_ms(form, (), batch, batch * 500)
            took = [pass_ms(form, [(new, past)], batch, batch * 500) for past in PAST]
            assert alone <= took[0] and took == sorted(took)
            for past, ms in zip(PAST, took, strict=True):
                assert ms <= pass_ms(form, [(new + past, 0)], batch, batch * 500)
    for made in (
        [pass_ms(form, [(round(2 ** (step / 8)), 0)], 0, 0) for step in range(8 * 16)],
        [pass_ms(form, (), batch, batch * 500) for batch in range(1, 1025)],
    ):
        assert made == sorted(made) and made[0] > 0


@pytest.mark.parametrize("name", shipped())
def test_cached_tokens_cost_no_more_than_computed_ones_and_more_tokens_no_less(name):
    obeys_physics(load_profile(name=name).form)


def test_a_mixed_pass_reads_the_weights_once():
    prompt, step = MODEL.pass_ns([(2048, 0)], 0, 0, 0), MODEL.pass_ns((), 32, 32 * 4096, 0)
    together = MODEL.pass_ns([(2048, 0)], 32, 32 * 4096, 0)
    weights = round(H200.coefficients.weights * 1e6)
    assert max(prompt, step) < together < prompt + step - 0.8 * weights
    assert MODEL.pass_ns((), 0, 0, 0) == 0
    assert MODEL.pass_ns([(0, 100)], 0, 0, 0) == 0


def test_launching_is_a_floor_for_passes_with_prompts():
    form, of = H200.form, H200.coefficients
    assert pass_ms(form, [(16, 0)], 0, 0) == pytest.approx(of.launch + of.host)
    assert pass_ms(form, [(16, 2048)], 0, 0) == pytest.approx(of.launch + of.past_launch + of.host)
    assert pass_ms(form, (), 16, 16 * 528) < of.launch


def test_speedups_divide_what_each_part_takes():
    fast = make_timing(ProfileTiming(name="h200-llama3-8b", speedup_ratio=2.0, decode_speedup_ratio=4.0), 0)
    prompt, step = MODEL.pass_ns([(2048, 0)], 0, 0, 0), MODEL.pass_ns((), 32, 32 * 4096, 0)
    both = MODEL.pass_ns([(2048, 0)], 32, 32 * 4096, 0)
    assert fast.pass_ns([(2048, 0)], 0, 0, 0) == round(prompt / 2)
    assert fast.pass_ns((), 32, 32 * 4096, 0) == round(step / 8)
    assert fast.pass_ns([(2048, 0)], 32, 32 * 4096, 0) == round(prompt / 2) + round((both - prompt) / 8)


@pytest.mark.parametrize(
    ("name", "data", "limits"),
    [
        ("h200-llama3-8b", "h200.jsonl", {"prefill": (31, 0.05), "decode": (33, 0.015), "all": (64, 0.03)}),
        (
            "h200-llama3-8b-graphs",
            "h200-graphs.jsonl",
            {"prefill": (44, 0.03), "decode": (46, 0.015), "mixed": (46, 0.025)},
        ),
    ],
)
def test_shipped_profiles_agree_with_their_measurements(name, data, limits):
    measured = rows(data)
    model = make_timing(ProfileTiming(name=name), 0)
    errors = errors_by_kind(measured, [model.pass_ns(*row.shape) / 1e6 / row.ms - 1 for row in measured])
    profile = load_profile(name=name)
    for kind, (points, limit) in limits.items():
        assert errors[kind].points == points
        assert errors[kind].mean < limit
        assert errors[kind].mean == pytest.approx(profile.errors[kind].fitted, abs=1e-4)
        assert profile.errors[kind].unseen < 0.065


@pytest.mark.parametrize(
    ("name", "data"), [("h200-llama3-8b", "h200.jsonl"), ("h200-llama3-8b-graphs", "h200-graphs.jsonl")]
)
def test_shipped_profiles_are_what_the_fit_gives(name, data):
    measured = rows(data)
    found = fit(measured)
    of = load_profile(name=name).form
    for row in measured:
        assert pass_ms(found.form, *row.shape) == pytest.approx(pass_ms(of, *row.shape), rel=0.005)


def test_mixed_passes_follow_from_the_others():
    measured = rows("h200-graphs.jsonl")
    found = fit([row for row in measured if row.kind != "mixed"])
    mixed = [row for row in measured if row.kind == "mixed"]
    errors = errors_by_kind(mixed, [pass_ms(found.form, *row.shape) / row.ms - 1 for row in mixed])["mixed"]
    assert errors.points == 46
    assert errors.mean < 0.04


def test_half_a_grid_gives_the_other_half():
    measured = rows("h200-graphs.jsonl")
    found = fit(measured[::2])
    left = measured[1::2]
    errors = errors_by_kind(left, [pass_ms(found.form, *row.shape) / row.ms - 1 for row in left])
    assert max(of.mean for of in errors.values()) < 0.05


SMALL_CARD = Form(
    coefficients=Coefficients(
        weights=21.0,
        token=0.11,
        blend=2.5,
        sequence=0.004,
        attention=3e-6,
        past_attention=3e-6,
        past_read=1e-4,
        past_copy=2e-5,
        launch=15.0,
        past_launch=0.5,
        context=1.4e-4,
    )
)


def synthetic(noise: float, stalls: int) -> list[Measurement]:
    """Passes of an imagined small card, with noise, and some that took three times as long."""
    random = np.random.default_rng(7)
    shapes = [
        ("prefill", ((new, past),), 0, 0) for new in (16, 128, 512, 2048, 8192) for past in (0, 1024, 8192, 32768)
    ]
    shapes += [("decode", (), batch, ctx) for batch in (1, 4, 16, 64, 256) for ctx in (128, 1024, 8192)]
    made = []
    for index, (kind, prefills, batch, ctx) in enumerate(shapes):
        ms = pass_ms(SMALL_CARD, prefills, batch, batch * ctx) * float(np.exp(random.normal(0, noise)))
        stalled = index % 9 == 4 and index // 9 < stalls
        made.append(Measurement(kind, prefills, batch, batch * ctx, ctx, ms * 3 if stalled else ms))
    return made


@pytest.mark.parametrize(
    ("noise", "stalls", "limit"),
    [(0.0, 0, 0.005), pytest.param(0.02, 0, 0.025, marks=pytest.mark.slow), (0.02, 3, 0.035)],
)
def test_a_fit_finds_a_card_again(noise, stalls, limit):
    found = fit(synthetic(noise, stalls))
    clean = synthetic(0.0, 0)
    errors = [pass_ms(found.form, *row.shape) / row.ms - 1 for row in clean]
    assert errors_by_kind(clean, errors)["all"].mean < limit
    far = pass_ms(found.form, [(16384, 16384)], 0, 0) / pass_ms(SMALL_CARD, [(16384, 16384)], 0, 0)
    assert far == pytest.approx(1.0, abs=0.1)


def test_measurements_without_past_still_give_a_sensible_profile():
    found = fit([row for row in synthetic(0.0, 0) if not (row.prefills and row.prefills[0][1])])
    cold, warm = (pass_ms(found.form, [(2048, past)], 0, 0) for past in (0, 8192))
    assert cold < warm < 3 * cold


def test_unseen_errors_are_of_fits_without_the_point():
    measured = synthetic(0.0, 0)
    odd = measured[-1]
    worse = [*measured[:-1], msgspec.structs.replace(odd, ms=odd.ms * 1.08)]
    found = fit(worse)
    assert abs(found.errors[-1]) < abs(found.unseen_errors[-1]) == pytest.approx(1 - 1 / 1.08, abs=0.01)


def test_too_few_measurements():
    measured = synthetic(0.0, 0)
    with pytest.raises(KvyardError, match="at least 4 passes with prompts and 4 with decode steps, got 20 and 0"):
        fit([row for row in measured if row.kind == "prefill"])


def test_rows_are_read(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"kind": "device", "name": "Card"}\n\n{"kind": "copy", "ms": []}\n{"kind": "prefill", "new": 5, "past": 0, "ms": 2}\n'
        '{"kind": "mixed", "prefills": [[5, 0], [1, 9]], "batch": 2, "ctx": 7, "ms": 3.5}\n'
        '{"kind": "mixed", "prefills": [[5, 0]], "batch": 0, "ctx": 0, "ms": 3.5}\n'
    )
    read = read_passes(path)
    assert read.device == "Card"
    assert [row.shape for row in read.rows] == [
        (((5, 0),), 0, 0, 0),
        (((5, 0), (1, 9)), 2, 14, 7),
        (((5, 0),), 0, 0, 0),
    ]
    assert str(read.rows[1]) == "5 new after 0, 1 new after 9, 2 decoding at 7"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: not a JSON object"),
        ("{}", "line 2: no kind"),
        ('{"kind": "prefill", "new": 5, "past": 0}', "line 2: ms must be a number above 0, got None"),
        ('{"kind": "prefill", "new": 5, "past": 0, "ms": 0}', "line 2: ms must be"),
        ('{"kind": "prefill", "new": 5, "past": 0, "ms": true}', "line 2: ms must be"),
        ('{"kind": "prefill", "new": 0, "past": 0, "ms": 1}', "line 2: new must be a whole number of at least 1"),
        ('{"kind": "prefill", "new": 5, "ms": 1}', "line 2: past must be"),
        ('{"kind": "decode", "batch": 1.5, "ctx": 1, "ms": 1}', "line 2: batch must be"),
        ('{"kind": "decode", "batch": 1, "ms": 1}', "line 2: ctx must be"),
        ('{"kind": "mixed", "prefills": [5], "batch": 1, "ctx": 1, "ms": 1}', "line 2: prefills must be a list"),
        ('{"kind": "mixed", "prefills": [[0, 5]], "batch": 1, "ctx": 1, "ms": 1}', "line 2: new must be"),
        ('{"kind": "mixed", "prefills": [], "batch": 0, "ctx": 1, "ms": 1}', "line 2: a mixed pass computes something"),
    ],
)
def test_bad_rows_are_named(tmp_path, line, words):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"kind": "decode", "batch": 1, "ctx": 9, "ms": 1}}\n{line}\n')
    with pytest.raises(KvyardError) as refused:
        read_passes(path)
    assert words in str(refused.value)
    assert str(path) in str(refused.value)


def test_many_bad_rows_are_counted(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("{\n" * 8)
    with pytest.raises(KvyardError, match=r"line 5: .*; and 3 more"):
        read_passes(path)


def test_files_that_are_no_measurements(tmp_path):
    with pytest.raises(KvyardError, match="no such file"):
        read_passes(tmp_path / "none.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(KvyardError, match="can't be read"):
        read_passes(tmp_path / "binary")
    (tmp_path / "other").write_text('{"kind": "copy"}\n')
    with pytest.raises(KvyardError, match="no measured pass"):
        read_passes(tmp_path / "other")


def test_profiles_are_read_and_refused(tmp_path):
    assert {"h200-llama3-8b", "h200-llama3-8b-graphs"} <= set(shipped())
    path = tmp_path / "mine.json"
    path.write_bytes(msgspec.json.encode(H200))
    assert load_profile(path=path) == H200
    assert make_timing({"kind": "profile", "path": str(path)}, 0).pass_ns((), 1, 9, 0) == MODEL.pass_ns((), 1, 9, 0)
    with pytest.raises(KvyardError, match=r"unknown profile 'tpu': choose one of h200-llama3-8b"):
        load_profile(name="tpu")
    with pytest.raises(KvyardError, match="can't be read: No such file"):
        load_profile(path=tmp_path / "none.json")
    for text, words in (
        ("[]", "not a profile"),
        ("{", "not a profile"),
        ('{"name": "x"}', "missing required field `coefficients`"),
    ):
        path.write_text(text)
        with pytest.raises(KvyardError, match=words):
            load_profile(path=path)
    for change, words in (
        ({"weights": 0.0}, "weights must be above 0"),
        ({"token": -1.0}, "token must be a number of at least 0"),
        ({"blend": 0.5}, "blend at least 1"),
    ):
        bad = Profile(name="bad", coefficients=msgspec.structs.replace(H200.coefficients, **change))
        path.write_bytes(msgspec.json.encode(bad))
        with pytest.raises(KvyardError, match=words):
            load_profile(path=path)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(H200, format="kvyard-profile/9")))
    with pytest.raises(KvyardError, match="this version of kvyard reads"):
        load_profile(path=path)


def test_base_is_the_blend_of_two_limits():
    of = Form(coefficients=msgspec.structs.replace(SMALL_CARD.coefficients, blend=2.0, sequence=0.0))
    assert base_ms(of, 0, 0) == pytest.approx(21.0)
    assert base_ms(of, 200, 1) == pytest.approx((21.0**2 + 22.0**2) ** 0.5)


TRUTH = Path(__file__).parents[3] / "benchmarks" / "data" / "h200-engine"


@pytest.mark.parametrize(("file", "limit"), [("fit-breaks-on-this-log", 0.05), ("fit-breaks-on-this-moe", 0.03)])
def test_a_fit_is_always_a_profile(file, limit):
    """Both files once gave a blend below 1, which is refused: a log without pure prompts, and a mixture of experts."""
    measured = read_passes(TRUTH / f"{file}.jsonl").rows
    found = fit(measured)
    Profile(name="x", coefficients=found.coefficients, curve=found.curve).check("here")
    obeys_physics(found.form)
    assert errors_by_kind(measured, found.unseen_errors)["all"].mean < limit


def test_a_curve_is_kept_only_where_it_is_worth_it():
    assert fit(synthetic(0.0, 0)).curve == {}
    middle = {64, 128, 256, 512}
    bent = [
        msgspec.structs.replace(row, ms=row.ms * 1.5)
        if {row.batch, *(new for new, _ in row.prefills)} & middle
        else row
        for row in synthetic(0.0, 0)
    ]
    assert fit(bent).curve


def test_a_curve_never_makes_more_tokens_cheaper():
    """Steps of four requests that took longer than those of 64, as on a machine that was busy at first."""
    busy = [
        msgspec.structs.replace(row, ms=row.ms * 3.0) if row.batch in (1, 4, 16) else row for row in synthetic(0.0, 0)
    ]
    obeys_physics(fit(busy).form)


def test_a_slow_kernel_for_prompts_with_past_is_bounded_by_computing_them_whole():
    slow = msgspec.structs.replace(SMALL_CARD.coefficients, past_attention=9e-5, past_copy=0.01, past_launch=30.0)
    obeys_physics(Form(coefficients=slow))
    quick = msgspec.structs.replace(SMALL_CARD.coefficients, past_attention=1e-9, past_copy=0.0, past_read=0.0)
    obeys_physics(Form(coefficients=quick))


def test_longest_contexts_host_and_mixed_passes_count():
    of = msgspec.structs.replace(SMALL_CARD.coefficients, skew=0.1, host=0.5, mixed_decode=2.0, mixed_launch=7.0)
    form, plain = Form(coefficients=of), SMALL_CARD
    even = pass_ms(plain, (), 8, 8000)
    assert pass_ms(form, (), 8, 8000, 1000) == pytest.approx(even + 0.5)
    assert pass_ms(form, (), 8, 8000, 3000) == pytest.approx(even + 0.5 + of.context * 0.1 * 16000)
    mixed = pass_ms(form, [(8192, 0)], 8, 8000, 1000) - pass_ms(plain, [(8192, 0)], 8, 8000, 1000)
    assert mixed == pytest.approx(0.5 + of.context * 8000)


@given(
    batch=st.integers(1, 600),
    context=st.integers(600, 900_000),
    longest=st.integers(0, 9000),
    passes=st.sampled_from([1, 5, 40]),
)
def test_plans_equal_single_passes_with_longest_contexts(batch, context, longest, passes):
    coefficients = msgspec.structs.replace(SMALL_CARD.coefficients, skew=0.07, host=0.3)
    profile = Profile(name="x", coefficients=coefficients, curve={1: 1.1, 64: 0.9})
    model = ProfileModel(profile, ProfileTiming(name="x"))
    planned = model.decode_ns(batch, context, passes, longest).tolist()
    assert planned == [model.pass_ns((), batch, context + at * batch, longest + at) for at in range(passes)]


def test_the_search_begins_with_what_the_extremes_of_steps_show():
    """A step with hardly any context shows the weights, the one with the most what context adds; at least a tenth of it."""
    prompt = Measurement("prefill", ((1000, 0),), 0, 0, 0, 50.0)
    context = NAMES.index("context")
    for most_ms, added_ms in ((30.0, 20.0), (10.5, 1.05)):
        steps = [Measurement("decode", (), 1, 10, 10, 10.0), Measurement("decode", (), 8, 8000, 1000, most_ms)]
        guess = np.exp(_first_guess([prompt, *steps], apart=False))
        assert guess[context] == pytest.approx(added_ms / 8000)
