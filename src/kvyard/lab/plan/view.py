"""Result of a plan, in one paragraph, a table, a page and files."""

from __future__ import annotations

import shlex
from typing import Any

from kvyard.engine.models.planning import tokens_that_fit
from kvyard.engine.timing.error_range import LEVEL
from kvyard.lab.plan.plan import REQUESTS_PER_SECOND, Planned
from kvyard.lab.plan.search import ROUTERS, FleetOption
from kvyard.lab.plan.serve import serve_commands, serve_notes
from kvyard.lab.plan.shape import KV_DTYPES, Shape, in_flight
from kvyard.lab.study import Chart, Result, Row, Section, Table, columns
from kvyard.lab.study.charts import ANSWER, STANDINGS, Dot, Dots, dots
from kvyard.lab.study.settings_file import as_toml
from kvyard.replay.report.answers import limits as savings
from kvyard.replay.report.answers import time_parts
from kvyard.replay.report.html import tile
from kvyard.replay.report.metrics import COST
from kvyard.replay.report.room import MOST_CARDS, what_ifs
from kvyard.replay.report.slo import OF_A_RUN, WANTED, Limit, kept, missed
from kvyard.replay.settings import SETTINGS
from kvyard.settings import duration

FURTHER = ("ttft_p99", "itl_p99", "reuse", "rejected_share")
"""Metrics that are shown beside those of the limits."""
MOST_ROWS = 12
EDGE = 0.02
"""An answer with less room than this share of a limit is on the edge."""
OVER = "SLO met, but over the budget"
UNSURE = "SLO met in the replay, but a limit lies within the published error"
WHAT_IF = "SLO met, but with more blocks than the card holds"
LIMITING = {
    "prefill": "prompt computation (prefill) limits it",
    "decode": "decoding limits it",
    "cache": "room in the KV cache limits it",
    "link": "links to lower tiers limit it",
    "router": "routing limits it",
}


def view(planned: Planned) -> Result:
    """Return the result of a plan."""
    sentences = paragraph(planned)
    answer = planned.answer
    asked = " and ".join(map(str, planned.limits))
    replayed = planned.search.fleets
    table = _table(planned)
    files = {}
    commands: list[str] = []
    lines: list[str] = []
    if answer is not None:
        settings = planned.settings(answer)
        commands = serve_commands(settings, answer)
        roles = ["prefill ", "decode "] if answer.prefill else [""]
        counts = [answer.prefill, answer.workers - answer.prefill] if answer.prefill else [answer.workers]
        for role, count, command in zip(roles, counts, commands or [""] * len(roles), strict=True):
            engines = f"# start {count} {role}engine{'s' if count > 1 else ''}"
            lines += [f"{engines} with", command] if command else [engines]
        lines += [f"# {note}" for note in serve_notes(settings, answer)]
        lines += _whole(planned) if planned.part.first is not None else []
        prices = planned.prices[answer.shape.gpu]
        header = [f"kvyard plan {planned.trace}: {asked}", *sentences, *(line.removeprefix("# ") for line in lines)]
        if planned.part.first is not None:
            header.append(f"These requests: kvyard trace slice {planned.trace} part.jsonl{_slice(planned)}")
        elif planned.left_out:
            header.append(f"For the same requests in a replay: --max-tokens {planned.max_tokens}")
        files["plan.toml"] = lambda: as_toml("plan", header, settings, prices)
    return Result(
        kind="plan",
        title=f"A fleet for {asked}",
        about=f"{planned.base['model']} on {planned.trace}: {planned.about_traffic}. Fleets replayed: {len(replayed)}.",
        tables=[table] if table.rows else [],
        rows=[_row(planned, fleet) for fleet in replayed],
        rows_key="fleets",
        facts={
            "trace": planned.trace,
            "model": planned.base["model"],
            "slo": {limit.name: limit.value for limit in planned.limits},
            "budget": planned.budget,
            "currency": planned.price_list.currency,
            "prices_of": planned.price_list.date,
            "prices": planned.prices,
            "met": planned.met,
            "answer": None if answer is None else _row(planned, answer),
            "settings": None if answer is None else planned.settings(answer),
            "loads": {f"{times:g}": fleet.met for times, fleet in planned.loads.items()},
            "ruled_out": [{"shape": str(ruled.shape), "why": ruled.why} for ruled in planned.search.ruled_out],
            "says": sentences,
            "serve": commands,
        },
        advice=sentences,
        met=planned.met if table.rows else None,
        verdict=_verdict(planned),
        commands=lines,
        legend=f"Times are in ms unless a column says s, prices in {planned.price_list.currency} per hour.",
        tiles=_tiles(planned),
        sections=_sections(planned) if table.rows else [],
        config=None if answer is None else ("Settings of the answer, as in plan.toml", planned.settings(answer)),
        files=files,
    )


def _verdict(planned: Planned) -> str:
    """Return the verdict if it is more than that the SLO is met or not."""
    answer = planned.answer
    if answer is None:
        return ""
    if not planned.met:
        return OVER
    if _what_ifs(answer):
        return WHAT_IF
    return "" if _holds(planned, answer) else UNSURE


def _sections(planned: Planned) -> list[Section]:
    return [
        Section(
            title="Cost, cards and the SLO",
            text="Each dot is a fleet that was replayed, the dashed line the limit.",
            charts=[
                _frontier(planned, limit, by_cards)
                for limit in planned.limits
                if limit.name in WANTED
                for by_cards in (False, True)
            ],
        ),
        Section(title="Fleets", text="Those that keep the SLO first, the cheapest first.", table=_table(planned, None)),
    ]


def paragraph(planned: Planned) -> list[str]:
    """Return the answer in sentences: what to take, how sure that is, what limits it, and what is next to it."""
    answer = planned.answer
    if answer is None:
        return _none(planned)
    sentences = [_take(planned, answer), *_what_ifs(answer)]
    if planned.budget is not None and answer.cost > planned.budget:
        sentences.append(_over(planned))
    sentences += [_setup(planned, answer), _sure(planned, answer)]
    sentences.append(f"In this fleet {_limiting(answer)}.")
    sentences += [_own_cache(planned, answer), _cheaper(planned, answer), _better(planned, answer)]
    sentences += [_growth(planned), _other_card(planned, answer)]
    sentences.append(_traffic(planned))
    if planned.interrupted:
        sentences.append("The search was interrupted: this is the best so far.")
    return [sentence for sentence in sentences if sentence]


def money(planned: Planned, price: float) -> str:
    """Return a price per hour for people."""
    return f"{price:,.2f} {planned.price_list.currency} an hour"


def describe(fleet: FleetOption) -> str:
    """Return a fleet for people: ``24 H100 as 12 workers of 2 (TP2)``."""
    shape = fleet.shape
    each = f" of {shape.cards} ({shape.split})" if shape.cards > 1 else ""
    how = f"{fleet.workers} worker{'s' if fleet.workers != 1 else ''}{each}"
    if fleet.prefill:
        how = f"{fleet.prefill} prefill and {fleet.workers - fleet.prefill} decode workers{each}"
    extras = []
    if shape.kv_cache_dtype != "auto":
        extras.append(f"an {shape.kv_cache_dtype.upper()} KV cache")
    if shape.host_gib:
        whose = "rank" if shape.ranks > 1 else "worker"
        extras.append(f"{shape.host_gib_per_rank} GiB of host memory a {whose} for KV blocks")
    if fleet.router != ROUTERS[0]:
        extras.append(f"{fleet.router} routing")
    return f"{fleet.cards} {shape.gpu.upper()} as {how}{''.join(f', {extra}' for extra in extras)}"


def _take(planned: Planned, answer: FleetOption) -> str:
    return (
        f"Take {describe(answer)}: {money(planned, answer.cost)} ({_card_price(planned, answer)}). "
        f"{kept(answer.values, planned.limits)}."
    )


def _what_ifs(fleet: FleetOption) -> list[str]:
    """Return a sentence if the fleet's card doesn't hold the blocks that were set."""
    return [] if fleet.report is None else what_ifs(fleet.report.config)


def _card_price(planned: Planned, answer: FleetOption) -> str:
    """Return the price of the answer's card with its date; a price that was set has none."""
    gpu = answer.shape.gpu
    price = planned.prices[gpu].card
    return f"{price:g} a card, {planned.price_list.date if price == planned.price_list.card(gpu) else 'your price'}"


def _setup(planned: Planned, answer: FleetOption) -> str:
    """Return the router, the split, and the memory for KV blocks of the answer."""
    shape = answer.shape
    router = planned.base.get("router", answer.router)
    split = "prefill and decode apart" if answer.prefill else "no prefill/decode split"
    tokens = _room(planned, shape)
    host = " and no host memory"
    if shape.host_gib:
        host = f" and {shape.host_gib_per_rank} GiB of host memory"
    elif any(SETTINGS.parse({name: planned.base.get(name) for name in ("host_bytes", "host_blocks")}).values()):
        host = ""
    whose, cards = ("rank", shape.cards // shape.ranks) if shape.ranks > 1 else ("worker", shape.cards)
    where = "its cards" if cards > 1 else "its card"
    sentence = f"Route with {router}, {split}; a {whose} has room for {tokens:,} KV tokens on {where}{host}."
    if answer.max_model_len is not None:
        own = planned.search.alone[shape].engine.max_model_len
        sentence += f" So its longest request is {answer.max_model_len:,} tokens, where the model's own is {own:,}."
    if shape.tensor_parallel_size > MOST_CARDS:
        sentence += (
            f" A worker spans nodes of {MOST_CARDS} cards, and its times are those of one node's links: measure them."
        )
    return sentence


def _room(planned: Planned, shape: Shape) -> int:
    """Return the tokens that ``kvyard model`` says fit, which are fewer than the blocks hold if the model has windows."""
    engine = planned.search.alone[shape].engine
    if engine.max_model_len is None:
        return engine.capacity_tokens
    unsettled = in_flight(engine, shape, planned.base)
    # An engine doesn't count vLLM's null block.
    return tokens_that_fit(engine.specs, engine.max_model_len, unsettled, engine.num_gpu_blocks + 1)


def _sure(planned: Planned, answer: FleetOption) -> str:
    """Return how far comparable published runs were from what was predicted for them, and whether the limits hold even so."""
    assert answer.report is not None
    known = [
        (limit, stated) for limit in planned.limits if (stated := answer.report.ranges.get(limit.name)) is not None
    ]
    if not known:
        return "How sure that is can't be said: no published run is comparable to this fleet."
    parts, open_ = [], []
    for limit, stated in known:
        metric = WANTED[limit.name]
        low, high = (metric.text(end, unit=True) for end in (stated.low, stated.high))
        parts.append(f"{metric.title} {low} to {high}")
        if limit.violation(stated.high) > 0:
            open_.append(metric.title)
    measured = f"By comparable published runs ({LEVEL:.0%} of them) that will be measured as {', '.join(parts)}"
    if not open_:
        return f"{measured}: the limits hold in that range."
    sure = [fleet for fleet in planned.search.candidates if fleet.met and _holds(planned, fleet)]
    instead = ""
    if sure:
        cheapest = min(sure, key=lambda fleet: fleet.cost)
        instead = f" {describe(cheapest)}, {money(planned, cheapest.cost)}, keeps it in the whole range."
    return f"{measured}: the limit of {' and '.join(open_)} lies inside that range, so measure before you buy.{instead}"


def _holds(planned: Planned, fleet: FleetOption) -> bool:
    """True if every limit with a range holds at the range's worse end."""
    assert fleet.report is not None
    ranges = fleet.report.ranges
    return all(limit.name not in ranges or limit.violation(ranges[limit.name].high) <= 0 for limit in planned.limits)


def _none(planned: Planned) -> list[str]:
    tried = [fleet for fleet in planned.search.candidates if fleet.report is not None]
    if not tried:
        return ["Nothing was replayed yet."]
    closest = min(tried, key=lambda fleet: (fleet.violation, fleet.cost))
    why = missed(closest.values, planned.limits)
    return [
        f"No fleet keeps the SLO, of {len(tried)} replayed. The closest is {describe(closest)}, "
        f"{money(planned, closest.cost)}: {why}.",
        *_what_ifs(closest),
        *(["The search was interrupted."] if planned.interrupted else ["More workers of these shapes don't help."]),
    ]


def _slice(planned: Planned) -> str:
    """Return the flags that cut the replayed requests out of the trace."""
    part = planned.part
    longest = f" --max-tokens {part.max_tokens}" if part.max_tokens is not None else ""
    return f" --skip {part.skip} --first {part.first}{longest}"


def _whole(planned: Planned) -> list[str]:
    """Return the command that holds an answer for a part of a large trace against all of it."""
    slo = ",".join(f"{limit.name}<{limit.value:g}" for limit in planned.limits if limit.name in OF_A_RUN)
    words = ["kvyard", "replay", planned.trace, "--config", str(planned.folder / "plan.toml")]
    words += ["--slo", slo] if slo else []
    words += ["--max-tokens", str(planned.max_tokens)] if planned.max_tokens is not None else []
    minutes = planned.whole.requests / REQUESTS_PER_SECOND / 60
    return [
        f"# hold it against all {planned.whole.requests:,} requests, in about {minutes:,.0f} min, with",
        shlex.join(words),
    ]


def _traffic(planned: Planned) -> str:
    left_out = f" Left out as longer than --max-tokens: {planned.left_out:,}." if planned.left_out else ""
    return f"The traffic: {planned.about_traffic}.{left_out}{_partial(planned)}{_bunched(planned)}{_loop(planned)}"


def _partial(planned: Planned) -> str:
    """Say in which ways a plan for a part of a large trace errs."""
    if planned.part.first is None:
        return ""
    pace = f"all requests come at {planned.whole.rate:,.2f} a second, and " if planned.whole.rate else ""
    return (
        f" A plan for a part is no proof for the whole: {pace}the part begins with empty caches. So a cheaper fleet may keep "
        "the SLO, and this one may miss a limit that it has little room to: replay all requests before you buy."
    )


def _loop(planned: Planned) -> str:
    """Say what load a closed loop was, which the traffic doesn't show."""
    answer = planned.answer
    if planned.whole.arrivals is not None or answer is None:
        return ""
    served = WANTED["requests_per_s"].text(answer.values.get("requests_per_s"))
    sentence = f" Clients wait for answers: {served} requests a second were served."
    asked = SETTINGS.parse({"concurrency": planned.base.get("concurrency")}).get("concurrency")
    sessions = planned.traffic.stamped
    if asked is not None and sessions < asked:
        sentence += f" {sessions:,} sessions are fewer than --concurrency {asked:,}: take more of the trace (--limit)."
    return sentence


def _bunched(planned: Planned) -> str:
    """Say if the arrivals share few stamps, and no ``--jitter`` spreads them."""
    traffic = planned.traffic
    if not traffic.bunched or duration("jitter", planned.base.get("jitter", 0)):
        return ""
    return (
        f" They share {traffic.stamps:,} stamps, mostly {traffic.tick:.3g} s apart: if the recorder's clock made these bursts, "
        f"plan with --jitter {traffic.tick:.3g}s, too, which spreads them."
    )


def _over(planned: Planned) -> str:
    assert planned.budget is not None
    within = [fleet for fleet in planned.search.candidates if fleet.report is not None and fleet.cost <= planned.budget]
    if not within:
        return f"That is over the budget of {money(planned, planned.budget)}."
    best = min(within, key=lambda fleet: (fleet.violation, fleet.cost))
    return (
        f"That is over the budget of {money(planned, planned.budget)}; within it the closest is {describe(best)}: "
        f"{missed(best.values, planned.limits)}."
    )


def _limiting(answer: FleetOption) -> str:
    assert answer.report is not None
    parts = time_parts(answer.report)
    if parts is None:
        return "what limits it isn't known"
    found = savings(answer.report, parts)
    first, whole = LIMITING[found.of_first], LIMITING[found.of_whole]
    if first == whole:
        return f"{first.removesuffix(' it')} both the first token and the whole answer"
    return f"{first.removesuffix(' it')} the first token, and {whole.removesuffix(' it')} the whole answer"


def _own_cache(planned: Planned, answer: FleetOption) -> str:
    """Return a sentence on the cheapest fleet with the model's own KV cache type, if the answer has another that nobody set."""
    if answer.shape.kv_cache_dtype == KV_DTYPES[0]:
        return ""
    own = [fleet for fleet in planned.search.candidates if fleet.met and fleet.shape.kv_cache_dtype == KV_DTYPES[0]]
    kind = answer.shape.kv_cache_dtype.upper()
    if not own:
        return f"An {kind} cache may cost accuracy, so check that; no fleet without it that was replayed keeps the SLO."
    cheapest = min(own, key=lambda fleet: fleet.cost)
    return (
        f"An {kind} cache may cost accuracy, so check that; without it the cheapest is {describe(cheapest)}, "
        f"{money(planned, cheapest.cost)}."
    )


def _cheaper(planned: Planned, answer: FleetOption) -> str:
    below = [fleet for fleet in planned.search.candidates if fleet.report is not None and fleet.cost < answer.cost]
    if not below:
        return ""
    nearest = min(below, key=lambda fleet: (fleet.violation, fleet.cost))
    why = missed(nearest.values, planned.limits)
    return f"Cheaper and closest is {describe(nearest)}, {money(planned, nearest.cost)}: there {why}."


def _better(planned: Planned, answer: FleetOption) -> str:
    """Return a sentence on the cheapest fleet that is better in the metric with the least room, and before it, if that room
    is small, that the answer is on the edge.
    """
    known = [
        (limit.violation(value), limit)
        for limit in planned.limits
        if (value := answer.values.get(limit.name)) is not None
    ]
    if not known:
        return ""
    own, tight = max(known, key=lambda miss: miss[0])
    metric = WANTED[tight.name]
    above = [
        fleet
        for fleet in planned.search.candidates
        if fleet.met and (value := fleet.values.get(tight.name)) is not None and tight.violation(value) < own
    ]
    edge = ""
    if own > -EDGE:
        near = f"{metric.title} is within {EDGE:.0%} of its limit"
        edge = f"It is on the edge: {near}, so that a small change of the traffic may miss it."
    if not above:
        return f"{edge} No fleet that was replayed has more room." if edge else ""
    nearest = min(above, key=lambda fleet: (fleet.cost, tight.violation(fleet.values[tight.name] or 0.0)))
    shown = metric.text(nearest.values.get(tight.name), unit=True)
    better = f"Next better, the cheapest with a better {metric.title}, is {describe(nearest)}"
    return f"{edge} {better}, {money(planned, nearest.cost)}: {shown}.".strip()


def _growth(planned: Planned) -> str:
    kept = [times for times, fleet in planned.loads.items() if fleet.met]
    missed_at = [times for times, fleet in planned.loads.items() if not fleet.met]
    if missed_at and kept:
        return f"It keeps the SLO at {max(kept):g} times this traffic, and not at {missed_at[0]:g} times."
    if missed_at:
        return f"It has no room: at {missed_at[0]:g} times this traffic it misses the SLO."
    return f"It keeps the SLO at {max(kept):g} times this traffic." if kept else ""


def _other_card(planned: Planned, answer: FleetOption) -> str:
    """Return a sentence on the price at which another card would be the cheapest."""
    others: dict[str, FleetOption] = {}
    for fleet in planned.search.candidates:
        if fleet.met and fleet.shape.gpu != answer.shape.gpu:
            least = others.get(fleet.shape.gpu)
            others[fleet.shape.gpu] = fleet if least is None or fleet.cost < least.cost else least
    cards = []
    for gpu, fleet in others.items():
        own = planned.prices[gpu].card
        below = (answer.cost - (fleet.cost - fleet.cards * own)) / fleet.cards
        if below > 0:
            cards.append(f"{gpu.upper()} at {below:,.2f} {planned.price_list.currency} ({own:g} now)")
    return f"As cheap would be {' or '.join(cards)}." if cards else ""


def _table(planned: Planned, most: int | None = MOST_ROWS) -> Table:
    """Return the cheapest fleet of each shape and arrangement, those that keep the SLO first."""
    replayed = [fleet for fleet in planned.search.fleets if fleet.report is not None]
    shown = replayed
    if most is not None:
        best: dict[tuple[Shape, bool, str], FleetOption] = {}
        for fleet in sorted((fleet for fleet in replayed if not fleet.host_unread), key=_order):
            best.setdefault((fleet.shape, bool(fleet.prefill), fleet.router), fleet)
        shown = list(best.values())
    shown = sorted(shown, key=_order)[:most]
    names = list(dict.fromkeys([COST.name, *(limit.name for limit in planned.limits), *FURTHER]))
    rows = [
        Row(
            cells={"fleet": fleet.name, "cards": str(fleet.cards), "SLO": _standing(fleet)},
            values={**fleet.values, COST.name: fleet.cost},
            bold=fleet is planned.answer,
        )
        for fleet in shown
    ]
    return Table(rows=rows, shown=names, tall=most is None)


def _standing(fleet: FleetOption) -> str:
    return f"{'met' if fleet.met else 'NOT met'}{', host memory unread' if fleet.host_unread else ''}"


def _order(fleet: FleetOption) -> tuple[bool, float, float]:
    return not fleet.met, fleet.cost if fleet.met else fleet.violation, fleet.cost


def _row(planned: Planned, fleet: FleetOption) -> dict[str, Any]:
    return {
        "fleet": fleet.name,
        "gpu": fleet.shape.gpu,
        "cards": fleet.cards,
        "workers": fleet.workers,
        "prefill": fleet.prefill,
        "tensor_parallel_size": fleet.shape.tensor_parallel_size,
        "pipeline_parallel_size": fleet.shape.stages,
        "dp_size": fleet.shape.ranks,
        "max_model_len": fleet.max_model_len,
        "kv_cache_dtype": fleet.shape.kv_cache_dtype,
        "host_gib_per_card": fleet.shape.host_gib,
        "router": fleet.router,
        "cost": fleet.cost,
        "slo_met": fleet.met,
        **columns(fleet.values),
        "why": fleet.why,
    }


def _tiles(planned: Planned) -> list[str]:
    answer = planned.answer
    if answer is None:
        return []
    tiles = [
        tile("cards", f"{answer.cards} {answer.shape.gpu.upper()}", "", answer.name),
        tile(
            "cost",
            f"{answer.cost:,.2f}",
            f"{planned.price_list.currency} an hour",
            _card_price(planned, answer),
        ),
    ]
    for limit in planned.limits:
        metric = WANTED[limit.name]
        tiles.append(tile(metric.title, metric.text(answer.values.get(limit.name), unit=True), "", str(limit)))
    return tiles


def _frontier(planned: Planned, limit: Limit, by_cards: bool) -> Chart:
    """Return cost or cards against the metric of one limit, with the limit as a line and the answer marked."""
    metric = WANTED[limit.name]
    groups: dict[str, list[Dot]] = {name: [] for name in STANDINGS}
    for fleet in planned.search.fleets:
        value = fleet.values.get(limit.name)
        if value is not None:
            kind = ANSWER if fleet is planned.answer else "SLO met" if fleet.met else "SLO NOT met"
            groups[kind].append(Dot(float(fleet.cards) if by_cards else fleet.cost, value, fleet.name))
    drawn = [Dots(name, points, STANDINGS[name], name == ANSWER) for name, points in groups.items()]
    across = "cards" if by_cards else f"{planned.price_list.currency} an hour"
    return dots(metric, drawn, across, f"{metric.title} and {'cards' if by_cards else 'cost'}", limit, by_cards)
