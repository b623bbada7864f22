"""``kvyard plan``: how many cards, which, and what they cost."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kvyard.cli.app import INTERRUPTED
from kvyard.cli.reading import CHAIN_IDS, Quiet, TraceFile, with_reading
from kvyard.cli.serving import Json
from kvyard.cli.settings import with_settings
from kvyard.cli.study import UNMET, Bars, Out, Ray, executor, folder_of, present
from kvyard.errors import KvyardError
from kvyard.lab.plan.plan import FOUND
from kvyard.lab.study.cost import TUNE_SETTINGS, parted

QUESTION = "Question"
SEARCHED = ("tensor_parallel_size", "router", "kv_cache_dtype", "host_bytes")
HOURS = {"h": 1.0, "hour": 1.0, "day": 24.0, "month": 730.0, "year": 8760.0}
BUDGET = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z]{3})?(?: ?/ ?([a-z]+))?")
"""A price, its currency and the time that it is for."""


@with_settings(TUNE_SETTINGS, hidden=FOUND, searched=SEARCHED)
@with_reading(CHAIN_IDS, block_size="--trace-block-size")
def plan(
    trace: TraceFile,
    settings: Mapping[str, object],
    reading: Mapping[str, Any],
    slo: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC<LIMIT,...",
            help="Limits that the fleet must meet, such as 'ttft_p99<2s,itl_p99<50ms' (quoted).",
            rich_help_panel=QUESTION,
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="PRICE/h",
            help="What the fleet may cost, such as 60/h or 43800/month, in the currency of the prices.",
            rich_help_panel=QUESTION,
        ),
    ] = None,
    split: Annotated[
        bool,
        typer.Option(
            "--split/--no-split",
            help="Also try fleets with prefill and decode workers.",
            rich_help_panel=QUESTION,
        ),
    ] = True,
    prices: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with prices of cards; kvyard's own is engine/prices.toml.", rich_help_panel=QUESTION
        ),
    ] = None,
    out: Out = None,
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", help="Replays at a time; 1 by default.")] = None,
    ray: Ray = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Find the cheapest fleet that meets an SLO: cards, number, parallelism, split, memory and router.

    Traffic that no fleet can serve is refused within seconds. Then tensor parallelism, the number of workers, prefill and
    decode workers, host memory, router and KV cache type are searched; settings that you give are fixed. --gpu takes several
    cards, as in h100,h200. Results are a paragraph, a page (plan.html), all fleets (plan.csv, plan.json), and settings
    (plan.toml) that kvyard replay and kvyard gateway take with --config. The same command continues an interrupted plan. Exit
    code 1 if no fleet meets the SLO and the budget, 130 if interrupted.
    """
    from kvyard.engine.price_list import default_prices, read_prices
    from kvyard.lab.plan import plan as run
    from kvyard.lab.plan.shape import check_gpus
    from kvyard.lab.plan.view import paragraph, view
    from kvyard.replay.report.slo import parse_limits

    given = dict(settings)
    gpus = check_gpus(str(given.pop("gpu", None) or ""))
    price_list = default_prices() if prices is None else read_prices(prices)
    by_card = {}
    for gpu in gpus:
        if price_list.card(gpu) is None and "price_card" not in given:
            raise KvyardError(f"the price list has no {gpu}: say --price-card, or --prices FILE with all cards")
        base, by_card[gpu] = parted({**given, "gpu": gpu}, price_list)
    base.pop("gpu")
    folder = folder_of(out, "plan", trace)
    with executor(jobs or 1, ray) as crew, Bars(quiet) as bars:
        done = run(
            trace,
            gpus,
            parse_limits(slo),
            folder=folder,
            prices=by_card,
            price_list=price_list,
            budget=None if budget is None else _per_hour(budget, price_list.currency),
            split=split,
            config=base,
            say=bars.say,
            executor=crew,
            **reading,
            counted=bars.counted,
            progress=bars.advance,
        )
    present(view(done), folder, quiet, as_json)
    if done.interrupted:
        typer.echo("Interrupted; the same command goes on from there.", err=True)
        raise typer.Exit(INTERRUPTED)
    if not done.met:
        if quiet:
            typer.echo(paragraph(done)[0], err=True)
        raise typer.Exit(UNMET)


def _per_hour(text: str, currency: str) -> float:
    """Return a price per hour from ``60``, ``60/h``, ``60 USD/h`` or ``43800/month``. Raises ``KvyardError``."""
    matched = BUDGET.fullmatch(text.strip())
    if matched is None or matched[3] not in (None, *HOURS):
        raise KvyardError(f"--budget {text!r}: a price above 0 in {currency}, such as 60/h, 1440/day or 43800/month")
    if matched[2] and matched[2].upper() != currency.upper():
        raise KvyardError(f"--budget {text!r}: the prices are in {currency}: convert it, or pass --prices with yours")
    price = float(matched[1]) / HOURS[matched[3] or "h"]
    if not 0 < price < float("inf"):
        raise KvyardError(f"--budget {text!r}: a price above 0, such as 60/h")
    return price
