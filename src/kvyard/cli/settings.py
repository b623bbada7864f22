"""Settings of a replay as command-line flags, the same for every command that runs one.

Those people reach for have flags of their own; all others go through ``--set NAME=VALUE``. Values stay text here: what they
mean is the business of ``kvyard.replay.settings``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kvyard.engine.timing import timing_choices
from kvyard.errors import KvyardError
from kvyard.replay.config import LEFT_OUT
from kvyard.replay.run import merged
from kvyard.replay.settings import SETTINGS, refuse_unknown
from kvyard.replay.values import Parser, bandwidth, count, duration, number, size
from kvyard.router import POLICIES

FLAGS: Mapping[str, str] = {
    "workers": "Workers, 8 by default.",
    "router": f"{', '.join(POLICIES.names())}; kv by default.",
    "block_size": "Tokens per block, 64 by default.",
    "num_gpu_blocks": "Blocks on each device, 16384 by default.",
    "model": "Instead: a preset of kvyard model --list, or a config.json ...",
    "gpu_memory": "... and the memory of a card, such as 80GiB.",
    "tensor_parallel_size": "Cards that share the model.",
    "bytes_per_token": "Without a model: what a token takes in the cache, 128KiB by default.",
    "max_model_len": "Tokens of the longest request.",
    "max_num_seqs": "Requests per pass.",
    "max_num_batched_tokens": "Tokens per pass.",
    "timing": f"{timing_choices()} (see kvyard profile).",
    "dp_size": "Data-parallel ranks of each worker.",
    "host_blocks": "Blocks of host memory per worker, such as 20k; 0 for none.",
    "host_bytes": "The same in bytes, such as 200GiB.",
    "host_bandwidth": "GB/s between device and host, out/back, such as 32/32 (the default).",
    "link": "Instead: a measured link, h200 or h200-queued.",
    "host_scope": "private, or one shared by all workers.",
    "storage_blocks": "Blocks of storage behind the host.",
    "storage_bytes": "The same in bytes.",
    "storage_bandwidth": "GB/s between host and storage, 10/10 by default.",
    "storage_scope": "private or shared.",
    "offload_policy": "write_through (the default), write_through_generated, after_hits or on_eviction.",
    "speedup": "Divide gaps between arrivals, and think times, by this.",
    "concurrency": "Closed loop: so many sessions (or requests) under way, whatever the recorded times.",
    "limit": "Replay so many requests at most.",
    "event_lag": "Until the router sees what a worker announced, such as 50ms.",
    "seed": "Of whatever is drawn; 0 by default.",
}
"""Settings with a flag of their own, and its help."""
METAVARS: Mapping[Parser, str] = {count: "N", number: "X", size: "SIZE", duration: "TIME", bandwidth: "GB/S"}
"""By how a setting is read; names for all others."""


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` with all flags of settings, which it gets as one mapping, ``settings``: file, flags and ``--set`` in one."""
    own = [one for one in inspect.signature(command, eval_str=True).parameters.values() if one.name != "settings"]
    flags = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[str | None, typer.Option(help=text, metavar=_metavar(name))],
        )
        for name, text in FLAGS.items()
    ]
    # What is left out is refused by name, with the reason, rather than as a typing error.
    flags += [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[str | None, typer.Option(hidden=True)],
        )
        for name in LEFT_OUT
    ]
    more = [
        inspect.Parameter(
            "config",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[Path | None, typer.Option(help="Settings from a TOML file; flags go before it.")],
        ),
        inspect.Parameter(
            "set_",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                list[str] | None,
                typer.Option("--set", metavar="NAME=VALUE", help="Any other setting; --list-settings names them."),
            ],
        ),
        inspect.Parameter(
            "list_settings",
            inspect.Parameter.KEYWORD_ONLY,
            default=False,
            annotation=Annotated[
                bool,
                typer.Option("--list-settings", callback=_list, is_eager=True, help="Name all settings and exit."),
            ],
        ),
    ]

    def wrapper(**given: Any) -> None:
        flagged = {name: given.pop(name) for name in FLAGS}
        refuse_unknown([name for name in LEFT_OUT if given.pop(name) is not None], SETTINGS)
        given.pop("list_settings")
        settings = merged(given.pop("config"), flagged | _assigned(given.pop("set_") or [], flagged))
        command(**given, settings=settings)

    arguments = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own]
    wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
    wrapper.__signature__ = inspect.Signature([*arguments, *flags, *more])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {one.name: one.annotation for one in (*arguments, *flags, *more)}
    return wrapper


def _assigned(texts: list[str], flagged: Mapping[str, object]) -> dict[str, object]:
    found: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not value.strip():
            raise KvyardError(f"--set {text}: write NAME=VALUE, such as --set temperature=0.5")
        refuse_unknown([name], SETTINGS, " after --set")
        if flagged.get(name) is not None or name in found:
            raise KvyardError(f"{name} is set twice: leave one of the two out")
        found[name] = value.strip()
    return found


def _metavar(name: str) -> str:
    return "N" if name == "workers" else METAVARS.get(SETTINGS[name].parse, "NAME")


def _list(wanted: bool) -> None:
    if wanted:
        width = max(map(len, SETTINGS))
        for name, setting in SETTINGS.items():
            typer.echo(f"{name:<{width}}  {setting.summary}")
        raise typer.Exit
