"""``plan``: examine the traffic, rule out impossible fleets, search, and find the load that the answer can bear."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvyard.engine.cards import find_card
from kvyard.engine.models import find_config
from kvyard.engine.price_list import PriceList
from kvyard.errors import KvyardError
from kvyard.lab.jobs import TracePart
from kvyard.lab.plan.search import FleetOption, FleetSearch, Ruled, fleet_config
from kvyard.lab.plan.shape import Shape, shapes
from kvyard.lab.plan.traffic import Traffic, read_traffic
from kvyard.lab.study import Study, own_options
from kvyard.lab.study.cost import SPLITS, Prices
from kvyard.lab.study.goals import judged
from kvyard.lab.study.seeds import not_set
from kvyard.replay.report.report import REJECTED
from kvyard.replay.report.slo import Limit, without_value
from kvyard.replay.settings import SETTINGS, make_config
from kvyard.router import RouterConfig
from kvyard.settings import chosen

LOADS = (1.1, 1.25, 1.5, 2.0)
"""Times the traffic that the answer is asked to bear, in order, until it doesn't."""
MOST_REQUESTS = 20_000
"""A trace with more requests is planned for by a part of it, unless a limit says how many to take."""
PART_REQUESTS = 10_000
"""Requests of that part."""
REQUESTS_PER_SECOND = 1_000
"""Requests that a replay gets through in a second of CPU, roughly: what an estimate of its time is made with."""
LONG_S = 60
"""Seconds of a replay from which on its time is worth a word."""
FOUND = {
    "workers": "--gpu and --slo alone (or kvyard replay for a fleet of your own)",
    "prefill": "--gpu and --slo alone (or kvyard replay for a fleet of your own)",
    "decode": "--gpu and --slo alone (or kvyard replay for a fleet of your own)",
    "autoscale": "a fleet of fixed size, and see docs/how-to/scaling.md for the rest",
}


class Planned(msgspec.Struct):
    """Result of a plan so far."""

    trace: str
    folder: Path
    base: dict[str, object]
    """Settings that aren't searched."""
    limits: list[Limit]
    budget: float | None
    """Price per hour that the fleet may have."""
    price_list: PriceList
    prices: dict[str, Prices]
    """By card."""
    traffic: Traffic
    left_out: int
    """Requests that were too long."""
    max_tokens: int | None
    """Tokens of the longest requests that weren't left out, prompt and answer together."""
    limit: int | None
    """Number of the trace's first requests that were asked for."""
    part: TracePart
    """Requests that are replayed."""
    whole: Traffic
    """All requests that were asked for, of which ``traffic`` is what is replayed."""
    search: FleetSearch
    loads: dict[float, FleetOption] = msgspec.field(default_factory=dict)
    """The answer at several times the traffic."""
    interrupted: bool = False

    @property
    def answer(self) -> FleetOption | None:
        """The cheapest fleet that keeps the SLO."""
        return self.search.best

    @property
    def met(self) -> bool:
        """True if a fleet keeps the SLO and the budget."""
        answer = self.answer
        return answer is not None and (self.budget is None or answer.cost <= self.budget)

    @property
    def about_traffic(self) -> str:
        """The traffic, and which part of the trace it is."""
        requests = self.traffic.requests
        if self.part.first is not None:
            return self.traffic.text(f"the {self.chosen}")
        if self.limit is None or requests + self.left_out < self.limit:
            return str(self.traffic)
        of = f"{requests:,} of " if self.left_out else ""
        return self.traffic.text(f"{of}the first {self.limit:,} requests (--limit)")

    @property
    def chosen(self) -> str:
        """Which requests of a large trace are replayed."""
        which = "first" if self.whole.arrivals is None else "busiest"
        row = "" if self.whole.arrivals is None else " in a row"
        begin = "" if not self.part.skip else f", from request {self.part.skip + 1:,} on"
        return f"{which} {self.traffic.requests:,} requests{row} of {self.whole.requests:,}{begin}"

    def settings(self, fleet: FleetOption) -> dict[str, object]:
        """Return all settings of a fleet's replay."""
        return {**self.base, **fleet.settings()}


def plan(
    trace: str | Path,
    gpus: Sequence[str],
    limits: Sequence[Limit],
    *,
    folder: str | Path,
    prices: Mapping[str, Prices],
    price_list: PriceList,
    budget: float | None = None,
    split: bool = True,
    config: str | Path | Mapping[str, object] | None = None,
    say: Callable[[str], None] = lambda text: None,
    **more: Any,
) -> Planned:
    """Search for the cheapest fleet of ``gpus`` that keeps ``limits`` on ``trace``.

    ``config`` and ``more`` are as for ``sweep``, without an SLO; what they set isn't searched. ``prices`` are by card. A trace
    with very many requests and no limit is planned for by its busiest part; ``say`` receives that before the first replay, and
    how long a replay takes if that is long. Raises
    ``KvyardError`` for what makes no sense, and for what no fleet can do, before anything is replayed. A KeyboardInterrupt
    ends it; reports of finished replays stay in ``folder``, and the same call goes on from there.
    """
    options, settings = own_options(more)
    base = {name: value for name, value in SETTINGS.merge(config, settings).items() if value is not None}
    not_set(FOUND, "kvyard plan", None, base)
    if base.get("model") is None:
        raise KvyardError("which model? Say --model Qwen/Qwen3-32B, a preset's name or a config.json")
    if not limits:
        raise KvyardError("what must hold? Say --slo, as in --slo 'ttft_p99<2s,itl_p99<50ms'")
    find_config(str(base["model"]))
    # Settings that no shape changes are refused first.
    RouterConfig(**chosen(RouterConfig, SETTINGS.parse(base)))
    for gpu in gpus:
        if not prices[gpu].card:
            raise KvyardError(f"the price of {gpu} is 0: without a price no fleet is the cheapest")
    given = SETTINGS.parse({name: base.get(name) for name in ("limit", "max_tokens", "speedup", *SPLITS)})
    base.pop("limit", None)
    base.pop("max_tokens", None)
    max_tokens = given.get("max_tokens")
    speedup = given.get("speedup", 1.0)
    if not 0 < speedup < float("inf"):
        raise KvyardError(f"speedup must be a number above 0, got {speedup:g}")
    study = Study(trace, folder, **options, limit=given.get("limit"))
    closed = base.get("concurrency") is not None or study.source.grouped
    part = TracePart(max_tokens=max_tokens)
    whole = traffic = read_traffic(part.of(study.source), speedup=speedup, closed=closed)
    if given.get("limit") is None and whole.requests > MOST_REQUESTS:
        part = msgspec.structs.replace(part, skip=whole.busiest(PART_REQUESTS), first=PART_REQUESTS)
        traffic = read_traffic(part.of(study.source), speedup=speedup, closed=closed)

    def replay(fleets: Sequence[FleetOption]) -> None:
        _replay(study, part, base, limits, fleets)
        through = len(planned.search.fleets) + len(fleets)
        study.counted(through + planned.search.waiting, through)

    planned = Planned(
        trace=study.trace,
        folder=study.folder,
        base=base,
        limits=list(limits),
        budget=budget,
        price_list=price_list,
        prices=dict(prices),
        traffic=traffic,
        left_out=0 if max_tokens is None else sum(1 for _ in study.source) - whole.requests,
        max_tokens=max_tokens,
        limit=given.get("limit"),
        part=part,
        whole=whole,
        search=FleetSearch(
            base=base,
            traffic=traffic,
            limits=limits,
            prices=prices,
            replay=replay,
            jobs=study.executor.jobs,
            split=split,
        ),
    )
    wanted = shapes(gpus, *(given.get(name) for name in SPLITS))
    _refuse_long(planned, wanted)
    study.make_folder()
    _say_time(planned, say)
    try:
        planned.search.run(wanted)
        _refuse_ruled_out(planned)
        _refuse_failed(planned)
        if planned.answer is not None and not closed:
            _load(planned, study, part, speedup)
    except KeyboardInterrupt:
        planned.interrupted = True
    return planned


def _say_time(planned: Planned, say: Callable[[str], None]) -> None:
    """Say which part of a large trace is replayed, or how long its replays take, before the first one."""
    requests = planned.whole.requests
    minutes = requests / REQUESTS_PER_SECOND / 60
    replays = f"a replay of {requests:,} requests takes about {minutes:,.0f} min, and a plan needs 10 to 40"
    if planned.part.first is not None:
        say(f"{replays}: planning for the {planned.chosen}. --limit {requests} takes all.")
    elif minutes * 60 >= LONG_S:
        say(f"{replays}: a smaller --limit is quicker, and what is finished is kept if you interrupt it.")


def _replay(
    study: Study, part: TracePart, base: Mapping[str, object], limits: Sequence[Limit], fleets: Sequence[FleetOption]
) -> None:
    """Replay ``fleets``, and fill in their reports."""
    points = {}
    for fleet in fleets:
        try:
            points[fleet.name] = study.point(fleet.settings(), fleet_config(base, fleet), part)
        except KvyardError as error:
            fleet.why, fleet.violation = str(error), float("inf")
    reports = study.replay(list(points.values()))
    for fleet in fleets:
        point = points.get(fleet.name)
        if point is None:
            continue
        fleet.report = reports.get(point.key)
        if fleet.report is None:
            fleet.why, fleet.violation = study.failures[point.key], float("inf")
        else:
            fleet.values, fleet.violation = judged(fleet.report, fleet.cost, limits)
            if name := without_value(fleet.values, limits):
                raise KvyardError(
                    f"--slo: a replay of this trace has no {name}: limit what it has, such as ttft_p99, e2e_p95 or reuse"
                )


def _load(planned: Planned, study: Study, part: TracePart, speedup: float) -> None:
    """Replay the answer with more and more traffic, until it misses the SLO."""
    answer = planned.answer
    assert answer is not None
    for times in LOADS:
        fleet = msgspec.structs.replace(answer, report=None)
        _replay(study, part, {**planned.base, "speedup": speedup * times}, planned.limits, [fleet])
        planned.loads[times] = fleet
        if not fleet.met:
            return


def _refuse_long(planned: Planned, wanted: Sequence[Shape]) -> None:
    """Raise ``KvyardError`` if more prompts are too long for the model than a fleet may reject."""
    longest = 0
    for shape in wanted:
        try:
            config = make_config({**planned.base, **shape.settings(), "workers": 1})
        except KvyardError:
            continue
        longest = max(longest, config.workers[0].engine.max_model_len or 1 << 62)
    traffic = planned.whole
    too_long = traffic.too_long(longest) if longest else 0
    if too_long > REJECTED * traffic.requests:
        most = int(traffic.inputs.max() + traffic.outputs.max())
        raise KvyardError(
            f"{too_long:,} of {traffic.requests:,} prompts ({too_long / traffic.requests:.1%}) don't fit into the "
            f"{longest:,} tokens of {planned.base['model']}, and rejected requests count as missed: say --max-model-len {most} "
            f"if the model can be served so, or leave them out with --max-tokens {longest}"
        )


def _refuse_ruled_out(planned: Planned) -> None:
    """Raise ``KvyardError`` if no shape was worth a replay, with the shape that comes closest."""
    if planned.search.fleets:
        return
    ruled = planned.search.ruled_out
    slow = [one for one in ruled if one.floor]
    if not slow:
        largest = max(ruled, key=lambda one: find_card(one.shape.gpu).memory * one.shape.cards)
        raise KvyardError(f"{planned.base['model']} can't be served so: {largest.shape}: {largest.why}")
    best = min(slow, key=lambda one: one.floor)
    raise KvyardError(
        f"no number of cards keeps this SLO: {best.shape} comes closest, and there {best.why}{_longest(planned, best)}"
    )


def _refuse_failed(planned: Planned) -> None:
    """Raise ``KvyardError`` if no fleet could be replayed, with the first one's reason."""
    fleets = planned.search.fleets
    if all(fleet.report is None for fleet in fleets):
        raise KvyardError(f"no fleet could be replayed: {fleets[0].name}: {fleets[0].why}")


def _longest(planned: Planned, best: Ruled) -> str:
    """Say which prompts a TTFT limit fails by."""
    limit = next((limit for limit in planned.limits if limit.name.startswith("ttft")), None)
    if limit is None or "ttft" not in best.why:
        return ". A faster card, more tensor parallelism or FP8 weights (--quantization fp8) would help; more workers don't"
    times = planned.search.alone[best.shape].ttft_ms
    slow = sum(ms > limit.value for ms in times) / len(times)
    step = max(1, planned.traffic.requests // len(times))
    lengths = planned.traffic.inputs[::step][: len(times)]
    if slow == 1:
        return (
            f": no prompt takes less than {limit.value:,.0f} ms, even alone. More workers don't help; a looser limit or a "
            "faster card does. A time without a unit is in milliseconds"
        )
    least = min((length for length, ms in zip(lengths, times, strict=True) if ms > limit.value), default=0)
    return (
        f": {slow:.1%} of the prompts, of {least:,} tokens and more, take longer than {limit.value:,.0f} ms alone. More "
        f"workers don't help; a looser limit, a faster card or a plan without them (--max-tokens {least}) does"
    )
