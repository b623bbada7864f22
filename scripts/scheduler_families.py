"""Workloads that ``record_scheduler.py`` sends through vLLM's scheduler: families of settings and requests, drawn by a seed.

A family is a function that puts requests into a ``Traffic`` and returns the settings that differ from ``SETTINGS``. The
same family and seed are the same workload on every machine and for ever: a new version of vLLM is compared with an old
one by their logs. So the draws of a family, and their order, never change; another workload is another family.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

MS = 1_000_000
"""Nanoseconds."""

Settings = dict[str, Any]
Request = dict[str, Any]
Stretch = list[int]
"""The first of some consecutive token ids, and how many."""

SETTINGS: Settings = {
    "block_size": 16,
    "num_blocks": 601,
    "groups": [{"type": "full"}],
    "max_num_seqs": 32,
    "max_num_batched_tokens": 256,
    "max_model_len": 4096,
    "long_prefill_token_threshold": 0,
    "long_prefill_token_threshold_adaptive": False,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
    "policy": "fcfs",
    "scheduler_reserve_full_isl": True,
    "watermark": 0.0,
    "prefix_cache_retention_interval": 0,
    "async_scheduling": False,
    "num_speculative_tokens": 0,
}
"""Small sizes; the rest as vLLM 0.32 has it. ``num_blocks`` includes the null block. ``max_loras``, ``drafter`` and
``connector`` (requests have ``load`` and ``send``) are there only where a family has them."""
TIMING = {"base": 4_000_037, "per_token": 3_011, "per_request": 20_011, "per_context": 7}
"""What a step takes, in nanoseconds: primes of sorts, so that instants rarely meet by chance."""


class Traffic:
    """The requests of one workload, and the source of all its chance."""

    def __init__(self, family: str, seed: int) -> None:
        self.rng = random.Random(f"{family}@{seed}")
        self.requests: list[Request] = []
        self._next_token = 1000
        self._prefixes: list[Stretch] = []

    def text(self, count: int) -> Stretch:
        """``count`` tokens that occur nowhere else, so that equal ids mean equal text."""
        first = self._next_token
        self._next_token += count
        return [first, count]

    def after(self, mean: float) -> int:
        """A waiting time: exponential, ``mean`` nanoseconds on average."""
        return int(self.rng.expovariate(1.0) * mean)

    def share(self, count: int, low: int, high: int) -> None:
        """From now on, prompts may begin with one of ``count`` prefixes of ``low`` to ``high`` tokens."""
        self._prefixes = [self.text(self.rng.randint(low, high)) for _ in range(count)]

    def prompt(self, low: int, high: int, shared: float = 0.5) -> list[Stretch]:
        """``low`` to ``high`` tokens, which begin with a shared prefix or part of one with this probability."""
        rng = self.rng
        total = rng.randint(low, high)
        if self._prefixes and rng.random() < shared:
            first, count = rng.choice(self._prefixes)
            taken = min(count, total - 1, rng.choice([count, count, rng.randint(1, count)]))
            if taken > 0:
                return [[first, taken], self.text(total - taken)]
        return [self.text(total)]

    def send(
        self, arrival: int, prompt: list[Stretch], output: int, priority: int = 0, abort: int | None = None
    ) -> Request:
        """A request arrives."""
        self.requests.append(
            {
                "arrival": arrival,
                "prompt": [list(stretch) for stretch in prompt if stretch[1] > 0],
                "output": self.text(output),
                "priority": priority,
                "abort": abort,
            }
        )
        return self.requests[-1]

    def stream(
        self,
        count: int,
        gap: float,
        prompt: tuple[int, int],
        output: tuple[int, int],
        *,
        shared: float = 0.5,
        priorities: int = 1,
        abort: float = 0.0,
        patience: float = 0.0,
    ) -> None:
        """``count`` requests arrive, ``gap`` apart on average; a share of ``abort`` is given up after ``patience``."""
        rng, now = self.rng, 0
        for _ in range(count):
            now += self.after(gap)
            gives_up = now + 1 + self.after(patience) if rng.random() < abort else None
            self.send(now, self.prompt(*prompt, shared), rng.randint(*output), rng.randrange(priorities), gives_up)

    def adapt(self, adapters: int, plain: float) -> None:
        """Every request has one of so many LoRA adapters, but for a share of ``plain`` ones."""
        for request in self.requests:
            request["lora"] = None if self.rng.random() < plain else 1 + self.rng.randrange(adapters)

    def draft(self, most: int, likely: float) -> None:
        """Up to ``most`` drafts of a step hold, each as ``likely`` given that those before it do: of every request, how many
        do at each position of its answer, over and over again.
        """
        for request in self.requests:
            holds = []
            for _ in range(17):
                held = 0
                while held < most and self.rng.random() < likely:
                    held += 1
                holds.append(held)
            request["holds"] = holds

    def connect(self, loads: float, later: float, sends: float = 0.0, ms: int = 60) -> None:
        """A share of ``loads`` of the requests has part of its prompt elsewhere, and of those a share ``later`` gets it in the
        background, in ``ms`` on average; of all, a share of ``sends`` holds its blocks for a while after its end.
        """
        rng = self.rng
        for request in self.requests:
            length = sum(count for _, count in request["prompt"])
            request["load"] = request["send"] = None
            if length > 1 and rng.random() < loads:
                ns = 1 + self.after(ms * MS) if rng.random() < later else None
                tokens = rng.choice([length, rng.randint(1, length), rng.randint(1, length) // 16 * 16])
                if ns is None:
                    tokens = min(tokens, length - 1)  # a step must have a token to compute
                if tokens:
                    request["load"] = [tokens, ns]
            if rng.random() < sends:
                request["send"] = 1 + self.after(ms * MS)

    def in_order(self) -> list[Request]:
        """The requests by arrival, with ids that sort alike."""
        by_arrival = sorted(self.requests, key=lambda request: request["arrival"])
        return [{"request": f"r{index:03d}", **request} for index, request in enumerate(by_arrival)]


Family = Callable[[Traffic], Settings]

FAMILIES: dict[str, Family] = {}


def family(make: Family) -> Family:
    """Enter a family under its function's name."""
    FAMILIES[make.__name__.replace("_", "-")] = make
    return make


def derived(
    name: str, base: Family, doc: str, change: Callable[[Traffic], None] = lambda t: None, **settings: Any
) -> None:
    """Enter a family like ``base``: ``change`` is made to its requests, and ``settings`` are its own."""

    def make(t: Traffic) -> Settings:
        base_settings = base(t)
        change(t)
        return {**base_settings, **settings}

    make.__doc__ = doc
    FAMILIES[name] = make


def workload(name: str, seed: int) -> tuple[Settings, dict[str, int], list[Request]]:
    """The settings, the timing and the requests of one log. Raises ``KeyError`` for a family that isn't there."""
    traffic = Traffic(name, seed)
    settings = {**SETTINGS, **FAMILIES[name](traffic)}
    timing = settings.pop("timing", TIMING)
    return settings, timing, traffic.in_order()


# -- load and room ---------------------------------------------------------------------------------------------------


@family
def light(t: Traffic) -> Settings:
    """Low load, shared prefixes."""
    t.share(4, 30, 200)
    t.stream(40, 60 * MS, (20, 400), (1, 60))
    return {"max_num_batched_tokens": 512}


@family
def saturated(t: Traffic) -> Settings:
    """Room for all blocks, and more requests than seats."""
    t.share(4, 30, 200)
    t.stream(60, 2 * MS, (30, 300), (5, 80))
    return {"num_blocks": 1201, "max_num_seqs": 24}


@family
def scale(t: Traffic) -> Settings:
    """Sizes as they are in service."""
    t.share(12, 200, 4000)
    t.stream(150, 25 * MS, (100, 9000), (5, 160), shared=0.7)
    return {"num_blocks": 6001, "max_num_seqs": 128, "max_num_batched_tokens": 2048, "max_model_len": 16384}


@family
def preempt(t: Traffic) -> Settings:
    """40 blocks and long answers."""
    t.share(3, 20, 80)
    t.stream(40, 6 * MS, (10, 150), (20, 150))
    return {"num_blocks": 41, "max_num_seqs": 16, "max_num_batched_tokens": 128, "max_model_len": 512}


@family
def chunked(t: Traffic) -> Settings:
    """Long prompts, few tokens a step."""
    t.share(3, 100, 900)
    t.stream(25, 30 * MS, (200, 2500), (5, 40))
    return {"num_blocks": 1501, "max_num_seqs": 16, "max_num_batched_tokens": 128, "max_model_len": 8192}


@family
def chunked_tight(t: Traffic) -> Settings:
    """The same in a small pool."""
    t.share(3, 100, 500)
    t.stream(25, 20 * MS, (100, 900), (10, 120))
    return {"num_blocks": 101, "max_num_seqs": 16, "max_num_batched_tokens": 128, "max_model_len": 1200}


@family
def turns(t: Traffic) -> Settings:
    """Conversations: a prompt is all that was said before, answers included, and something new."""
    systems = [t.text(t.rng.randint(20, 150)) for _ in range(3)]
    for _ in range(12):
        now = t.after(120 * MS)
        conversation = [t.rng.choice(systems)]
        for _ in range(t.rng.randint(2, 5)):
            conversation = [*conversation, t.text(t.rng.randint(5, 80))]
            conversation = [*conversation, t.send(now, conversation, t.rng.randint(5, 60))["output"]]
            now += t.after(900 * MS)
    return {"num_blocks": 181, "max_num_batched_tokens": 192, "max_model_len": 1500}


@family
def turns_tight(t: Traffic) -> Settings:
    """Conversations in a pool that forgets and preempts, some of them given up."""
    systems = [t.text(t.rng.randint(20, 90)) for _ in range(3)]
    for _ in range(14):
        now = t.after(150 * MS)
        conversation = [t.rng.choice(systems)]
        for _ in range(t.rng.randint(2, 5)):
            conversation = [*conversation, t.text(t.rng.randint(5, 60))]
            gives_up = now + t.after(200 * MS) + 1 if t.rng.random() < 0.15 else None
            conversation = [*conversation, t.send(now, conversation, t.rng.randint(5, 60), abort=gives_up)["output"]]
            now += t.after(700 * MS)
    return {"num_blocks": 61, "max_num_seqs": 8, "max_num_batched_tokens": 96, "max_model_len": 900}


@family
def seqs(t: Traffic) -> Settings:
    """Three seats."""
    t.share(3, 20, 100)
    t.stream(50, 10 * MS, (5, 120), (1, 40))
    return {"max_num_seqs": 3, "max_num_batched_tokens": 64, "num_blocks": 201}


@family
def capped(t: Traffic) -> Settings:
    """One request may fill the pool, and output ends at ``max_model_len``."""
    t.share(2, 20, 100)
    t.stream(25, 30 * MS, (10, 300), (20, 250))
    return {"num_blocks": 21, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 320}


@family
def together(t: Traffic) -> Settings:
    """Equal prompts, at one instant or while the first of them is being computed."""
    now = 0
    t.share(2, 40, 160)
    for _ in range(8):
        now += t.after(120 * MS)
        prompt = t.prompt(30, 400)
        for _ in range(t.rng.randint(2, 7)):
            late = t.rng.choice([0, 0, 0, t.rng.randint(1, 12 * MS)])
            t.send(now + late, prompt, t.rng.randint(1, 60))
    return {"num_blocks": 151, "max_num_seqs": 16, "max_num_batched_tokens": 128, "max_model_len": 600}


@family
def boundary(t: Traffic) -> Settings:
    """Every step takes 1 ms; all is sent and given up at the end of a step, or a nanosecond beside it."""
    rng, now = t.rng, 0
    t.share(3, 30, 120)
    for _ in range(50):
        now += rng.choice([0, 0, 1, 1, 2, 3, 8]) * MS
        beside = rng.choice([0, 0, 0, 1, MS - 1])
        gives_up = now + beside + rng.randint(1, 60) * MS + rng.choice([0, 0, 1]) if rng.random() < 0.3 else None
        t.send(now + beside, t.prompt(10, 150), rng.randint(1, 60), abort=gives_up)
    return {
        "num_blocks": 61,
        "max_num_seqs": 12,
        "max_num_batched_tokens": 96,
        "max_model_len": 512,
        "timing": {"base": MS, "per_token": 0, "per_request": 0, "per_context": 0},
    }


derived("nocache", preempt, "``preempt`` without prefix caching.", enable_prefix_caching=False)


@family
def nochunk(t: Traffic) -> Settings:
    """Prompts in one piece."""
    t.share(3, 20, 150)
    t.stream(40, 8 * MS, (10, 300), (5, 80))
    return {
        "enable_chunked_prefill": False,
        "num_blocks": 121,
        "max_num_seqs": 12,
        "max_num_batched_tokens": 400,
        "max_model_len": 400,
    }


derived("watermark", preempt, "``preempt`` with blocks kept free.", num_blocks=61, watermark=0.12)
derived(
    "first-chunk",
    chunked_tight,
    "``chunked-tight`` with admission by the first chunk alone.",
    scheduler_reserve_full_isl=False,
)


@family
def one_token(t: Traffic) -> Settings:
    """Mostly answers of one token, in a pool where the order of release matters."""
    now = 0
    t.share(4, 40, 160)
    for _ in range(60):
        now += t.after(8 * MS)
        t.send(now, t.prompt(20, 250, 0.8), t.rng.choice([1, 1, 1, 2, t.rng.randint(3, 80)]))
    return {"num_blocks": 61, "max_num_seqs": 12, "max_num_batched_tokens": 80, "max_model_len": 512}


# -- given up --------------------------------------------------------------------------------------------------------


@family
def abort(t: Traffic) -> Settings:
    """Half of the requests are given up."""
    t.share(4, 30, 120)
    t.stream(60, 8 * MS, (20, 200), (10, 120), shared=0.8, abort=0.5, patience=150 * MS)
    return {"num_blocks": 71, "max_num_seqs": 16, "max_num_batched_tokens": 128, "max_model_len": 600}


@family
def abort_tight(t: Traffic) -> Settings:
    """Long steps and short answers, so that many are given up in the step in which others end."""
    t.share(6, 30, 100)
    t.stream(90, 9 * MS, (30, 130), (2, 30), shared=0.9, abort=0.6, patience=60 * MS)
    return {
        "num_blocks": 41,
        "max_num_seqs": 10,
        "max_num_batched_tokens": 128,
        "max_model_len": 400,
        "timing": {"base": 9_000_011, "per_token": 30_011, "per_request": 200_003, "per_context": 101},
    }


# -- long prompts ----------------------------------------------------------------------------------------------------


@family
def threshold(t: Traffic) -> Settings:
    """``long_prefill_token_threshold`` at a load where many are alone."""
    now = 0
    t.share(2, 60, 300)
    for _ in range(30):
        now += t.after(40 * MS)
        size = (300, 1500) if t.rng.random() < 0.5 else (5, 60)
        t.send(now, t.prompt(*size, 0.3), t.rng.choice([1, 1, t.rng.randint(2, 40)]))
    return {"num_blocks": 901, "max_num_batched_tokens": 128, "long_prefill_token_threshold": 48}


@family
def threshold_busy(t: Traffic) -> Settings:
    """The same, more at once."""
    now = 0
    for _ in range(40):
        now += t.after(6 * MS)
        size = (200, 700) if t.rng.random() < 0.4 else (5, 60)
        t.send(now, t.prompt(*size, 0.0), t.rng.choice([1, 2, t.rng.randint(3, 60)]))
    return {
        "num_blocks": 901,
        "max_num_batched_tokens": 96,
        "long_prefill_token_threshold": 40,
        "max_num_seqs": 12,
    }


@family
def threshold_tight(t: Traffic) -> Settings:
    """Short answers beside prompts cut small, in a pool where the order of release decides who finds what."""
    now = 0
    t.share(5, 40, 120)
    for _ in range(60):
        now += t.after(7 * MS)
        size = (120, 400) if t.rng.random() < 0.3 else (30, 140)
        t.send(now, t.prompt(*size, 0.85), t.rng.choice([1, 1, 2, t.rng.randint(3, 60)]))
    return {
        "num_blocks": 61,
        "max_num_batched_tokens": 80,
        "long_prefill_token_threshold": 32,
        "max_num_seqs": 10,
        "max_model_len": 640,
    }


derived(
    "threshold-adaptive",
    threshold,
    "A threshold that is raised to an even share of the step.",
    long_prefill_token_threshold=24,
    long_prefill_token_threshold_adaptive=True,
)


# -- priorities ------------------------------------------------------------------------------------------------------


@family
def priority(t: Traffic) -> Settings:
    """Four priorities, room for all blocks."""
    t.share(4, 30, 200)
    t.stream(50, 4 * MS, (20, 250), (5, 60), priorities=4)
    return {"policy": "priority", "num_blocks": 901, "max_num_seqs": 8}


@family
def priority_tight(t: Traffic) -> Settings:
    """Four priorities and 40 blocks."""
    t.share(3, 20, 80)
    t.stream(40, 6 * MS, (10, 150), (20, 150), priorities=4)
    return {
        "policy": "priority",
        "num_blocks": 41,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "max_model_len": 512,
    }


@family
def priority_ties(t: Traffic) -> Settings:
    """Several requests of one priority and one arrival."""
    now = 0
    t.share(3, 20, 80)
    for _ in range(8):
        now += t.after(40 * MS)
        for _ in range(t.rng.randint(2, 6)):
            t.send(now, t.prompt(10, 150), t.rng.randint(20, 120), t.rng.randrange(2))
    return {
        "policy": "priority",
        "num_blocks": 41,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 128,
        "max_model_len": 512,
    }


# -- attention of other kinds ----------------------------------------------------------------------------------------


@family
def swa(t: Traffic) -> Settings:
    """Full attention and a window."""
    t.share(4, 60, 250)
    t.stream(40, 12 * MS, (20, 400), (5, 80), shared=0.7)
    return {
        "groups": [{"type": "full"}, {"type": "sliding_window", "window": 64}],
        "num_blocks": 241,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 128,
        "max_model_len": 1024,
    }


derived("swa-dense", swa, "``swa``, all that is reachable kept.", prefix_cache_retention_interval=None)
derived("swa-interval", swa, "``swa``, a checkpoint every 64 tokens.", prefix_cache_retention_interval=64)


@family
def swa_tight(t: Traffic) -> Settings:
    """Full attention and two windows in 80 blocks."""
    t.share(3, 30, 120)
    t.stream(35, 8 * MS, (10, 200), (20, 150), shared=0.6)
    return {
        "groups": [
            {"type": "full"},
            {"type": "sliding_window", "window": 40},
            {"type": "sliding_window", "window": 96},
        ],
        "num_blocks": 81,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 96,
        "max_model_len": 384,
    }


@family
def swa_only(t: Traffic) -> Settings:
    """One window and nothing else."""
    t.share(4, 40, 200)
    t.stream(40, 10 * MS, (20, 300), (5, 120), shared=0.7)
    return {
        "groups": [{"type": "sliding_window", "window": 96}],
        "num_blocks": 61,
        "max_num_seqs": 12,
        "max_num_batched_tokens": 96,
        "max_model_len": 800,
    }


@family
def swa_sizes(t: Traffic) -> Settings:
    """Groups with blocks of their own sizes."""
    t.share(4, 60, 250)
    t.stream(40, 12 * MS, (20, 400), (5, 80), shared=0.7)
    return {
        "groups": [{"type": "full", "block_size": 32}, {"type": "sliding_window", "window": 70, "block_size": 16}],
        "block_size": 32,
        "num_blocks": 161,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 128,
        "max_model_len": 1024,
    }


@family
def local(t: Traffic) -> Settings:
    """Chunked local attention beside full attention."""
    t.share(4, 60, 250)
    t.stream(40, 12 * MS, (20, 400), (5, 80), shared=0.7)
    return {
        "groups": [{"type": "full"}, {"type": "chunked_local", "chunk": 64}, {"type": "chunked_local", "chunk": 64}],
        "num_blocks": 201,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 128,
        "max_model_len": 1024,
    }


ALIGNED_STATES = [{"type": "full"}, {"type": "mamba", "mode": "align"}]


@family
def mamba(t: Traffic) -> Settings:
    """Full attention and aligned states."""
    t.share(4, 60, 250)
    t.stream(30, 20 * MS, (10, 400), (5, 60), shared=0.7)
    return {
        "groups": ALIGNED_STATES,
        "num_blocks": 301,
        "max_num_seqs": 12,
        "max_num_batched_tokens": 128,
        "max_model_len": 1024,
    }


@family
def mamba_tight(t: Traffic) -> Settings:
    """The same in 60 blocks."""
    t.share(3, 30, 120)
    t.stream(30, 10 * MS, (10, 200), (20, 120), shared=0.6)
    return {
        "groups": ALIGNED_STATES,
        "num_blocks": 61,
        "max_num_seqs": 12,
        "max_num_batched_tokens": 96,
        "max_model_len": 512,
    }


@family
def mamba_threshold(t: Traffic) -> Settings:
    """Aligned states, small steps, and short prompts behind long ones."""
    now = 0
    t.share(3, 60, 250)
    for _ in range(40):
        now += t.after(10 * MS)
        size = (150, 600) if t.rng.random() < 0.4 else (3, 30)
        t.send(now, t.prompt(*size, 0.5), t.rng.choice([1, t.rng.randint(2, 60)]))
    return {
        "groups": ALIGNED_STATES,
        "num_blocks": 301,
        "max_num_seqs": 12,
        "max_num_batched_tokens": 72,
        "max_model_len": 1024,
        "long_prefill_token_threshold": t.rng.choice([0, 0, 12, 40]),
    }


@family
def mamba_inside(t: Traffic) -> Settings:
    """``mamba``, or ``mamba-tight``, with states that chunks leave inside; all states are kept, or few."""
    settings = t.rng.choice([mamba, mamba_tight])(t)
    states = {"type": "mamba", "mode": "align", "checkpoint_unit": t.rng.choice([8, 16])}
    retention = t.rng.choice([0, None, 64])
    return {**settings, "groups": [{"type": "full"}, states], "prefix_cache_retention_interval": retention}


@family
def mamba_inside_fine(t: Traffic) -> Settings:
    """States in blocks of 64 beside blocks of 16, so that hits end inside blocks of states; chunks leave states inside."""
    settings = t.rng.choice([mamba, mamba_tight])(t)
    states = {"type": "mamba", "mode": "align", "block_size": 64}
    if t.rng.random() < 0.8:
        states["checkpoint_unit"] = t.rng.choice([16, 32])
    return {
        **settings,
        "groups": [{"type": "full", "block_size": 16}, states],
        "block_size": 64,
        "max_num_batched_tokens": t.rng.choice([128, 256]),
        "prefix_cache_retention_interval": t.rng.choice([0, None, 128]),
    }


derived("mamba-all", mamba, "``mamba``, every state kept.", groups=[{"type": "full"}, {"type": "mamba", "mode": "all"}])


# -- drawn by the seed -----------------------------------------------------------------------------------------------


@family
def mix(t: Traffic) -> Settings:
    """A bit of everything."""
    rng = t.rng
    t.share(4, 20, 200)
    policy = rng.choice(["fcfs", "fcfs", "priority"])
    t.stream(
        50,
        rng.choice([4, 8, 16]) * MS,
        (5, rng.choice([100, 300])),
        (1, rng.choice([30, 120])),
        shared=0.6,
        priorities=3,
        abort=0.2,
        patience=200 * MS,
    )
    groups: list[dict[str, Any]] = [{"type": "full"}]
    if rng.random() < 0.4:
        groups.append({"type": "sliding_window", "window": rng.choice([24, 64, 100])})
    return {
        "policy": policy,
        "groups": groups,
        "num_blocks": rng.choice([61, 91, 161]) * len(groups),
        "max_num_seqs": rng.choice([4, 12, 24]),
        "max_num_batched_tokens": rng.choice([48, 96, 256]),
        "max_model_len": 512,
        "watermark": rng.choice([0.0, 0.0, 0.05]),
        "scheduler_reserve_full_isl": rng.random() < 0.8,
        "prefix_cache_retention_interval": rng.choice([0, None]),
    }


GROUPS: list[list[dict[str, Any]]] = [
    [{"type": "full"}],
    [{"type": "full"}],
    [{"type": "full"}, {"type": "sliding_window", "window": 48}],
    ALIGNED_STATES,
    [{"type": "full"}, {"type": "chunked_local", "chunk": 32}],
    [{"type": "sliding_window", "window": 64}, {"type": "full"}, {"type": "sliding_window", "window": 24}],
]


@family
def fuzz(t: Traffic) -> Settings:
    """Every setting drawn."""
    rng = t.rng
    t.share(5, 20, 220)
    groups = rng.choice(GROUPS)
    size = rng.choice([8, 16, 16, 32])
    caching = rng.random() < 0.9 or groups is ALIGNED_STATES
    t.stream(
        60,
        rng.choice([3, 8, 16, 40]) * MS,
        (3, rng.choice([60, 150, 400])),
        (1, rng.choice([3, 30, 120])),
        shared=rng.choice([0.3, 0.9]),
        priorities=3,
        abort=rng.choice([0.0, 0.2, 0.5]),
        patience=150 * MS,
    )
    retention = rng.choice([0, 0, None])
    return {
        "groups": groups,
        "block_size": size,
        "policy": rng.choice(["fcfs", "fcfs", "priority"]),
        "num_blocks": rng.choice([600, 1000, 2400]) * len(groups) // size + 6,
        "max_num_seqs": rng.choice([3, 8, 24]),
        "max_num_batched_tokens": rng.choice([40, 96, 256]),
        "max_model_len": 560,
        "watermark": rng.choice([0.0, 0.0, 0.07]),
        "scheduler_reserve_full_isl": rng.random() < 0.8,
        "enable_prefix_caching": caching,
        "prefix_cache_retention_interval": retention,
        "long_prefill_token_threshold": rng.choice([0, 0, 0, 20, 50]),
        "long_prefill_token_threshold_adaptive": False,
    }


# -- asynchronous scheduling -----------------------------------------------------------------------------------------


@family
def overlap(t: Traffic) -> Settings:
    """Asynchronous scheduling, room for all blocks."""
    t.share(4, 30, 200)
    t.stream(40, 12 * MS, (20, 300), (5, 60))
    return {"async_scheduling": True, "num_blocks": 401, "max_num_seqs": 16}


derived("overlap-tight", preempt, "``preempt`` with asynchronous scheduling.", async_scheduling=True)
derived(
    "overlap-abort",
    abort_tight,
    "``abort-tight`` with asynchronous scheduling: what was given up is in a step that was decided on.",
    async_scheduling=True,
)
derived("overlap-boundary", boundary, "``boundary`` with asynchronous scheduling.", async_scheduling=True)
derived("overlap-priority", priority_tight, "``priority-tight`` with asynchronous scheduling.", async_scheduling=True)
derived(
    "overlap-threshold", threshold_tight, "``threshold-tight`` with asynchronous scheduling.", async_scheduling=True
)
derived("overlap-turns", turns_tight, "``turns-tight`` with asynchronous scheduling.", async_scheduling=True)
derived("overlap-swa", swa_tight, "``swa-tight`` with asynchronous scheduling.", async_scheduling=True)
derived("overlap-mamba", mamba_tight, "``mamba-tight`` with asynchronous scheduling.", async_scheduling=True)
derived("overlap-fuzz", fuzz, "``fuzz`` with asynchronous scheduling.", async_scheduling=True)


# -- several rules at once -------------------------------------------------------------------------------------------


@family
def priority_abort(t: Traffic) -> Settings:
    """Priorities where half of the requests are given up, many while they are preempted."""
    t.share(4, 30, 120)
    t.stream(60, 7 * MS, (20, 200), (10, 120), shared=0.8, priorities=4, abort=0.5, patience=200 * MS)
    return {
        "policy": "priority",
        "num_blocks": 51,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 96,
        "max_model_len": 600,
    }


@family
def priority_threshold(t: Traffic) -> Settings:
    """Priorities and prompts cut small: victims in the middle of their prompts."""
    t.share(3, 40, 160)
    t.stream(45, 6 * MS, (10, 400), (5, 90), shared=0.5, priorities=3)
    return {
        "policy": "priority",
        "num_blocks": 61,
        "max_num_seqs": 12,
        "max_num_batched_tokens": 80,
        "long_prefill_token_threshold": 24,
        "max_model_len": 640,
    }


derived("priority-swa", swa_tight, "Priorities with windows.", policy="priority")


@family
def threshold_abort(t: Traffic) -> Settings:
    """Prompts cut small, half of the requests given up, mostly before their first token."""
    t.share(3, 40, 200)
    t.stream(60, 8 * MS, (30, 600), (1, 60), shared=0.6, abort=0.5, patience=40 * MS)
    return {
        "num_blocks": 91,
        "max_num_seqs": 12,
        "max_num_batched_tokens": 96,
        "long_prefill_token_threshold": 32,
        "max_model_len": 700,
    }


@family
def abort_inside(t: Traffic) -> Settings:
    """Every step takes 1 ms; all is given up strictly inside a step, often several in one, many in their last."""
    rng, now = t.rng, 0
    t.share(3, 30, 120)
    for _ in range(60):
        now += rng.choice([0, 0, 1, 1, 2, 5]) * MS
        output = rng.randint(1, 40)
        gives_up = None
        if rng.random() < 0.6:
            gives_up = now + rng.choice([output, output + 1, rng.randint(1, 40)]) * MS + rng.randint(1, MS - 1)
        t.send(now, t.prompt(10, 150), output, abort=gives_up)
    return {
        "num_blocks": 51,
        "max_num_seqs": 12,
        "max_num_batched_tokens": 96,
        "max_model_len": 512,
        "timing": {"base": MS, "per_token": 0, "per_request": 0, "per_context": 0},
    }


derived("overlap-inside", abort_inside, "``abort-inside`` with asynchronous scheduling.", async_scheduling=True)


@family
def overlap_edges(t: Traffic) -> Settings:
    """Asynchronous scheduling, steps of 1 ms, room for all: long plans that are cut by what is sent and given up at, or a
    nanosecond beside, the ends of steps.
    """
    rng, now = t.rng, 0
    t.share(3, 30, 120)
    for _ in range(30):
        now += rng.choice([0, 3, 7, 20, 40]) * MS
        beside = rng.choice([0, 0, 0, 1, MS - 1])
        gives_up = now + beside + rng.randint(1, 90) * MS + rng.choice([0, 0, 0, 1]) if rng.random() < 0.5 else None
        t.send(now + beside, t.prompt(10, 150), rng.randint(20, 150), abort=gives_up)
    return {
        "async_scheduling": True,
        "num_blocks": rng.choice([151, 301]),
        "max_num_seqs": 16,
        "max_num_batched_tokens": 96,
        "max_model_len": 512,
        "timing": {"base": MS, "per_token": 0, "per_request": 0, "per_context": 0},
    }


# -- LoRA adapters ---------------------------------------------------------------------------------------------------


@family
def lora(t: Traffic) -> Settings:
    """Five adapters, two per step: requests are passed over by those behind them."""
    t.share(4, 30, 200)
    t.stream(50, 8 * MS, (20, 250), (5, 60))
    t.adapt(5, 0.2)
    return {"max_loras": 2, "num_blocks": 601, "max_num_seqs": 12}


@family
def lora_one(t: Traffic) -> Settings:
    """Three adapters, one per step."""
    t.share(3, 30, 120)
    t.stream(40, 12 * MS, (20, 200), (2, 40))
    t.adapt(3, 0.1)
    return {"max_loras": 1, "num_blocks": 301, "max_num_seqs": 8, "max_num_batched_tokens": 128}


derived("lora-tight", preempt, "Adapters in a pool that preempts.", lambda t: t.adapt(4, 0.25), max_loras=2)
derived("lora-abort", abort_tight, "Adapters whose requests are given up.", lambda t: t.adapt(4, 0.2), max_loras=2)
derived("lora-priority", priority_tight, "Adapters and priorities.", lambda t: t.adapt(4, 0.2), max_loras=2)
derived(
    "lora-overlap",
    abort,
    "Adapters with asynchronous scheduling.",
    lambda t: t.adapt(4, 0.2),
    max_loras=2,
    async_scheduling=True,
)


@family
def lora_fuzz(t: Traffic) -> Settings:
    """``fuzz`` with adapters."""
    settings = fuzz(t)
    t.adapt(t.rng.choice([2, 4, 8]), 0.2)
    return {**settings, "max_loras": t.rng.choice([1, 2, 3]), "async_scheduling": t.rng.random() < 0.3}


# -- draft tokens ----------------------------------------------------------------------------------------------------

UNTIMED_TOKENS = {**TIMING, "per_token": 0}
"""How long it takes to verify drafts is not the scheduler's business."""


@family
def drafts(t: Traffic) -> Settings:
    """Three drafts a step, room for all blocks."""
    t.share(4, 30, 200)
    t.stream(40, 15 * MS, (20, 300), (1, 80))
    t.draft(3, 0.6)
    return {"num_speculative_tokens": 3, "timing": UNTIMED_TOKENS, "drafter": "ngram", "max_num_seqs": 16}


derived(
    "drafts-tight",
    preempt,
    "Drafts in a pool that preempts.",
    lambda t: t.draft(4, 0.7),
    num_speculative_tokens=4,
    timing=UNTIMED_TOKENS,
    drafter="ngram",
)


@family
def drafts_capped(t: Traffic) -> Settings:
    """Drafts up to ``max_model_len``."""
    settings = capped(t)
    t.draft(5, 0.8)
    return {
        **settings,
        "num_speculative_tokens": 5,
        "timing": UNTIMED_TOKENS,
        "drafter": "ngram",
        "max_num_batched_tokens": 64,
    }


@family
def drafts_eagle(t: Traffic) -> Settings:
    """An eagle drafter: the last block of a hit is computed again, and drafts have slots of their own."""
    t.share(4, 30, 200)
    t.stream(40, 12 * MS, (20, 300), (1, 80), shared=0.7)
    t.draft(3, 0.6)
    return {
        "num_speculative_tokens": 3,
        "timing": UNTIMED_TOKENS,
        "drafter": "eagle",
        "max_num_seqs": 16,
        "num_blocks": 301,
    }


derived(
    "drafts-eagle-tight",
    turns_tight,
    "The same in a pool that preempts, conversations.",
    lambda t: t.draft(2, 0.7),
    num_speculative_tokens=2,
    timing=UNTIMED_TOKENS,
    drafter="eagle",
)
derived(
    "drafts-abort",
    abort_tight,
    "Drafts of requests that are given up.",
    lambda t: t.draft(3, 0.6),
    num_speculative_tokens=3,
    timing=UNTIMED_TOKENS,
    drafter="ngram",
)


@family
def drafts_priority(t: Traffic) -> Settings:
    """Drafts and priorities."""
    settings = priority_tight(t)
    t.draft(3, 0.6)
    return {
        **settings,
        "num_speculative_tokens": 3,
        "timing": UNTIMED_TOKENS,
        "drafter": t.rng.choice(["ngram", "eagle"]),
    }


@family
def drafts_together(t: Traffic) -> Settings:
    """Equal prompts: all of one but its last token is cached, and its step is filled with made-up drafts."""
    now = 0
    for _ in range(10):
        now += t.after(60 * MS)
        prompt = [t.text(16 * t.rng.randint(1, 8) + t.rng.choice([1, 1, 1, 5]))]
        for _ in range(t.rng.randint(2, 6)):
            t.send(now + t.rng.choice([0, t.rng.randint(1, 80 * MS)]), prompt, t.rng.randint(1, 60))
    t.draft(3, 0.6)
    return {
        "num_speculative_tokens": 3,
        "drafter": "ngram",
        "timing": UNTIMED_TOKENS,
        "num_blocks": 91,
        "max_num_seqs": 12,
        "max_num_batched_tokens": 64,
        "max_model_len": 400,
    }


@family
def drafts_swa(t: Traffic) -> Settings:
    """Drafts and windows."""
    settings = swa_tight(t)
    t.draft(2, 0.6)
    drafter = t.rng.choice(["ngram", "eagle"])
    return {**settings, "num_speculative_tokens": 2, "timing": UNTIMED_TOKENS, "drafter": drafter}


@family
def drafts_fuzz(t: Traffic) -> Settings:
    """``fuzz`` with drafts, and adapters at times."""
    settings = fuzz(t)
    if settings["groups"] is ALIGNED_STATES:
        settings["groups"] = [{"type": "full"}]  # with drafts, states need more blocks
    count = t.rng.choice([1, 2, 3, 5])
    t.draft(count, t.rng.choice([0.3, 0.8]))
    drafter = t.rng.choice(["ngram", "eagle"])
    if any(group["type"] == "chunked_local" for group in settings["groups"]):
        drafter = "ngram"  # vLLM has no other beside such groups
    settings |= {"num_speculative_tokens": count, "timing": UNTIMED_TOKENS, "drafter": drafter}
    if t.rng.random() < 0.3:
        t.adapt(3, 0.2)
        settings["max_loras"] = 2
    return settings


# -- KV connectors ---------------------------------------------------------------------------------------------------


derived(
    "connector-sync",
    light,
    "A connector has part of most prompts at once.",
    lambda t: t.connect(0.8, 0.0),
    connector=True,
)


@family
def connector_async(t: Traffic) -> Settings:
    """A connector brings part of most prompts in the background."""
    t.share(4, 30, 200)
    t.stream(40, 12 * MS, (20, 400), (1, 60))
    t.connect(0.8, 1.0)
    return {"connector": True, "max_num_seqs": 12}


derived(
    "connector-sync-tight",
    preempt,
    "``preempt`` with prompts that are there at once.",
    lambda t: t.connect(0.7, 0.0),
    connector=True,
)
derived(
    "connector-async-tight",
    preempt,
    "``preempt`` with loads in the background, which begin only where others keep what they still need.",
    lambda t: t.connect(0.7, 1.0, ms=30),
    connector=True,
)
derived(
    "connector-mixed",
    chunked_tight,
    "Loads of both kinds beside long prompts in a small pool, and blocks that are held after the end.",
    lambda t: t.connect(0.7, 0.5, sends=0.5),
    connector=True,
)
derived(
    "connector-sends",
    preempt,
    "Blocks of most requests are held after their end, in a pool where that is in the way of others.",
    lambda t: t.connect(0.3, 0.7, sends=0.8, ms=100),
    connector=True,
)
derived(
    "connector-turns",
    turns,
    "Conversations, of which a connector has what the pool forgot.",
    lambda t: t.connect(0.6, 0.6, sends=0.2, ms=20),
    num_blocks=81,
    connector=True,
)
derived(
    "connector-first-chunk",
    FAMILIES["connector-mixed"],
    "``connector-mixed`` with admission by the first chunk alone.",
    scheduler_reserve_full_isl=False,
)
derived(
    "connector-priority",
    priority_tight,
    "``priority-tight`` with loads of both kinds.",
    lambda t: t.connect(0.6, 0.7, sends=0.2, ms=30),
    connector=True,
)
derived(
    "connector-threshold",
    threshold_tight,
    "``threshold-tight`` with loads of both kinds: who loads counts among those that a long prompt would be in the way of.",
    lambda t: t.connect(0.6, 0.7, sends=0.2, ms=30),
    connector=True,
)
derived(
    "connector-swa",
    swa_tight,
    "``swa-tight`` with loads of both kinds.",
    lambda t: t.connect(0.6, 0.7, sends=0.3, ms=30),
    connector=True,
)
derived(
    "connector-abort",
    abort_tight,
    "``abort-tight`` with loads of both kinds: who is given up while loading keeps its blocks until the load is done.",
    lambda t: t.connect(0.7, 0.7, sends=0.3),
    connector=True,
)


@family
def connector_boundary(t: Traffic) -> Settings:
    """``boundary`` with loads and sends of whole milliseconds: all ends where a step does, or a nanosecond beside it."""
    settings = boundary(t)
    t.connect(0.7, 0.7, sends=0.3)
    beside = [0, 0, 0, 1, MS - 1]
    for request in t.requests:
        if request["load"] is not None and request["load"][1] is not None:
            request["load"][1] = t.rng.randint(1, 30) * MS + t.rng.choice(beside)
        if request["send"] is not None:
            request["send"] = t.rng.randint(1, 30) * MS + t.rng.choice(beside)
    return {**settings, "connector": True}


@family
def connector_fuzz(t: Traffic) -> Settings:
    """``fuzz`` with a connector."""
    settings = fuzz(t)
    if any(group["type"] == "mamba" for group in settings["groups"]):
        settings["groups"] = [{"type": "full"}]  # models with states aren't served with connectors
    t.connect(t.rng.choice([0.3, 0.8]), t.rng.choice([0.2, 0.8]), t.rng.choice([0.0, 0.4]), t.rng.choice([5, 60]))
    return {**settings, "connector": True}


@family
def connector_seats(t: Traffic) -> Settings:
    """Three seats: what was loaded waits for one with its blocks, while others compute the same prefix; many are given up."""
    t.share(3, 60, 160)
    t.stream(60, 6 * MS, (40, 220), (1, 30), shared=0.9, abort=0.4, patience=120 * MS)
    t.connect(0.7, 0.8, sends=0.2, ms=15)
    return {
        "connector": True,
        "num_blocks": 91,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 64,
        "max_model_len": 400,
        "timing": {"base": 9_000_011, "per_token": 30_011, "per_request": 200_003, "per_context": 101},
    }


@family
def connector_inside(t: Traffic) -> Settings:
    """Long steps and four seats: several are given up in one step, of those that run and of those that hold loaded blocks."""
    rng, now = t.rng, 0
    t.share(3, 30, 120)
    for _ in range(70):
        now += rng.choice([0, 2, 4, 8]) * MS
        gives_up = now + rng.randint(1, 90) * MS + rng.randint(1, MS - 1) if rng.random() < 0.8 else None
        t.send(now, t.prompt(20, 120, 0.8), rng.randint(1, 30), abort=gives_up)
    t.connect(0.8, 0.8, ms=4)
    return {
        "connector": True,
        "num_blocks": 81,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 128,
        "max_model_len": 400,
        "timing": {"base": 20_000_003, "per_token": 0, "per_request": 0, "per_context": 0},
    }
