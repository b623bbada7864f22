"""``kvyard model``: KV-cache groups, bytes and blocks of a model on a card."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import typer

from kvyard.cli.outputs import print_json, print_table
from kvyard.cli.settings import with_flags
from kvyard.engine.cards import CARDS, find_card
from kvyard.engine.models import ModelPlan, find_config, plan, preset, presets
from kvyard.engine.models.planning import PlanOptions
from kvyard.errors import KvyardError
from kvyard.settings import settings_of
from kvyard.units import parse_bytes, show_bytes


@with_flags(settings_of(PlanOptions))
def model(
    settings: Mapping[str, object],
    config: Annotated[
        str | None, typer.Argument(metavar="CONFIG.json|PRESET", help="A Hugging Face config.json, or a preset's name.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help=f"The card: {', '.join(CARDS)}.")] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="Memory of each card instead of --gpu, such as 80GiB or 24GB.")
    ] = None,
    prefix_caching: Annotated[
        bool, typer.Option(help="Plan with prefix caching (changes the blocks of Mamba).")
    ] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write JSON. Its field engine is an engine's configuration.")
    ] = False,
    list_presets: Annotated[bool, typer.Option("--list", help="Name the presets and exit.")] = False,
) -> None:
    """Compute how an engine caches a model on a card: groups of layers, bytes per token, number of blocks.

    The rules are vLLM's: layers that cache the same are grouped, all groups get pages of one size, and the memory that weights
    and activations leave is divided into blocks. Weights are computed from the config, activations are estimated.
    """
    if list_presets:
        _list()
        return
    if config is None:
        raise KvyardError("which model? Give a config.json or a preset's name; kvyard model --list names the presets")
    fields = find_config(config)
    if (gpu is None) == (gpu_memory is None):
        raise KvyardError("how much memory has a card? Say --gpu h100 or --gpu-memory 80GiB, one of the two")
    memory = parse_bytes(gpu_memory) if gpu_memory is not None else find_card(str(gpu)).memory
    limits = {} if gpu is None else find_card(gpu).limits
    options = {**limits, **settings_of(PlanOptions).parse(settings), "enable_prefix_caching": prefix_caching}
    planned = plan(fields, memory, **options)
    if as_json:
        print_json({**msgspec.to_builtins(planned), "engine": planned.engine_options()})
    else:
        _show(planned, config, PlanOptions(**options))


def _list() -> None:
    rows = [("preset", "parameters", "architecture", "source")]
    for name in presets():
        config = preset(name)
        planned = plan(config, 2**50, tensor_parallel_size=1)
        rows.append((name, f"{planned.parameters / 1e9:.1f} B", planned.architecture, str(config["source"])))
    print_table(rows, left=(0, 2, 3))


def _show(of: ModelPlan, config: str, on: PlanOptions) -> None:
    split = on.split
    cards = split.expert_ranks * split.pipeline_parallel_size
    each = f" over {cards} cards" if cards > 1 else ""
    typer.echo(f"{config}: {of.architecture}, {of.parameters / 1e9:.2f} B parameters{each}")
    if cards > 1:
        stage = (
            f", of stage {of.stage + 1} of {split.pipeline_parallel_size}, the fullest"
            if split.pipeline_parallel_size > 1
            else ""
        )
        typer.echo(f"What follows is of one card{stage}.")
    typer.echo("")
    rows = [("group", "kind", "layers", "tokens a block", "bytes a token", "padding")]
    for number, count, group in _alike(of):
        spec = group.spec
        kind = spec.kind + (f" {spec.window}" if spec.window else f" {spec.chunk}" if spec.chunk else "")
        per_token = "(a state)" if spec.is_state else str(group.used_bytes // spec.block_size)
        span = str(number) if count == 1 else f"{number}-{number + count - 1}"
        rows.append(
            (
                span,
                kind,
                str(group.layers),
                str(spec.block_size),
                per_token,
                f"{1 - group.used_bytes / of.bytes_per_block:.1%}",
            )
        )
    print_table(rows, left=(0, 1))
    typer.echo("")
    facts = [
        ("memory", show_bytes(of.memory)),
        ("weights", show_bytes(of.weights_bytes)),
        ("activations and libraries", show_bytes(of.reserve_bytes)),
        ("cache", show_bytes(of.cache_bytes)),
        ("a block", show_bytes(of.bytes_per_block)),
        ("blocks", f"{of.num_blocks:,}"),
        ("one more token", show_bytes(of.bytes_per_token)),
    ]
    if of.bytes_per_request:
        facts.append(("windows and states of a request", f"up to {show_bytes(of.bytes_per_request)}"))
    facts.append(("tokens that fit", f"{of.max_tokens:,}"))
    facts.append((f"requests of {of.max_model_len:,} tokens that fit", f"{of.max_concurrency:.2f}"))
    print_table(facts)
    if of.longest < of.max_model_len:
        typer.echo(
            f"\nA request of {of.max_model_len} tokens does not fit: say --max-model-len {of.longest} or less.",
            err=True,
        )


def _alike(of: ModelPlan) -> Sequence[tuple[int, int, Any]]:
    """Return runs of equal groups: number of the first, how many, one of them."""
    runs: list[tuple[int, int, Any]] = []
    for number, group in enumerate(of.layer_groups):
        if runs and runs[-1][2] == group:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1, group)
        else:
            runs.append((number, 1, group))
    return runs
