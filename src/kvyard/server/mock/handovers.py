"""Hand-overs: prompts computed by one worker for another, as with vLLM's NIXL connector.

A request with ``do_remote_decode`` computes a prompt; its blocks are kept for a lease, and its answer says where they are. One
with ``do_remote_prefill`` and those fields gets blocks for all that it lacks, waits until they have come over the network, and
generates. The source frees its blocks when they have arrived, or when the lease has ended without renewal. Workers renew it
while their transfer waits.

``WorkerHandovers`` is one worker's part, ``FleetHandovers`` the part that the workers of a process share: the network,
leases, and the way to workers of other processes, which is HTTP.
"""

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from uuid import uuid4

import msgspec

from kvyard.clock import Clock, from_seconds, pause
from kvyard.decode_errors import DECODE_ERRORS
from kvyard.engine.handovers import HandoverPeer
from kvyard.engine.job import Job, JobState
from kvyard.server.http_client import read_body
from kvyard.server.mock.config import MockConfig
from kvyard.server.mock.incoming import IncomingPrompt, PromptAddress, PromptSource, TransferWish
from kvyard.server.mock.network import LiveNetwork, PromptNetwork, PromptSizes
from kvyard.server.mock.schemas import ClaimKind, PromptClaim, PromptsHeld
from kvyard.server.supervisor import Supervisor

LOOK = 0.005
"""Real seconds between two questions for a prompt that is still being computed."""
MOST_BYTES = 1 << 20
"""Of its answer."""
ASK_SECONDS = 5.0
"""Seconds that another process gets to answer."""
RENEWALS = 6
"""Renewals of a lease in the time that it lasts; as in vLLM."""


Act = Callable[[str, Job, int, int | None], object]
"""Passes an action on a job of a rank to an engine, at a time or now."""


class KeptPrompt(msgspec.Struct, eq=False):
    """A prompt that was computed here for another worker."""

    job: Job
    rank: int
    until: int
    """End of its lease, in nominal time."""


class WorkerHandovers(HandoverPeer):
    """Both ends of hand-overs at one worker."""

    def __init__(
        self,
        number: int,
        label: str,
        lease: int,
        network: PromptNetwork,
        *,
        act: Act,
        lost: Callable[[IncomingPrompt], None],
        released: Callable[[IncomingPrompt], None] = lambda prompt: None,
        reserves_one: bool = False,
    ) -> None:
        """``act`` calls the worker's engine; ``lost`` receives prompts that will not come; ``released`` those that needn't
        be sent.
        """
        super().__init__(reserves_one=reserves_one)
        self.source = PromptSource(label=label, number=number)
        self.number = number
        self.kept: dict[str, KeptPrompt] = {}
        """By name: what others may fetch."""
        self.incoming: dict[str, IncomingPrompt] = {}
        """By job: what comes from others, until it decodes or is given up."""
        self.address = ("", 0)
        """Address of this worker for other processes."""
        self.engine_id = uuid4().hex
        self.expired = 0
        """Prompts that were not fetched in time."""
        self.recomputed = 0
        """Prompts that didn't come, and were computed here."""
        self._lease = lease
        self._network = network
        self._act = act
        self._lost = lost
        self._released = released
        self._wanted: dict[str, str] = {}
        """By job: under which name its prompt is to be kept."""

    def forget(self) -> None:
        """Forget everything of a worker that died: when it comes back, it is another engine."""
        self.kept.clear()
        self.incoming.clear()
        self._wanted.clear()
        self.engine_id = uuid4().hex

    # -- jobs -----------------------------------------------------------------------------------------------------------

    def keep(self, job: Job, name: str) -> None:
        """Keep the prompt of ``job`` for another worker; without a ``name`` it has the job's."""
        job.handed_over = True
        self._wanted[job.id] = name or job.id.partition(" ")[0]

    def expect(self, job: Job, rank: int, prompt: IncomingPrompt) -> None:
        """Expect the prompt of ``job`` from another worker."""
        job.received = True
        prompt.job, prompt.rank = job, rank
        self.incoming[job.id] = prompt

    def ended(self, job: Job, rank: int, now: int) -> dict[str, Any] | None:
        """End a job. Returns the transfer parameters of its prompt for the client, if it is kept."""
        prompt = self.incoming.pop(job.id, None)
        if prompt is not None and prompt.flow is None:
            self._released(prompt)  # it was given up before there was room for it
        name = self._wanted.pop(job.id, None)
        if name is None or job.state is not JobState.FINISHED:
            return None
        self.release([name], "")  # a room that is used twice: what was there before has no name any more
        self.kept[name] = KeptPrompt(job, rank, now + self._lease)
        host, port = self.address
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[block for extent in table.settle() for block in extent.ids] for table in job.tables],
            "remote_engine_id": self.engine_id,
            "remote_request_id": name,
            "remote_host": host,
            "remote_port": port,
            "tp_size": 1,
            "remote_num_tokens": job.num_computed_tokens,
        }

    # -- the engine's words ---------------------------------------------------------------------------------------------

    def needs_transfer(self, job: Job, missing: int, blocks: int) -> bool:
        prompt = self.incoming[job.id]
        prompt.tokens, prompt.blocks = missing, blocks
        return self._network.takes_time(prompt)

    def reserved(self, job: Job, now: int) -> None:
        self._network.send(self.incoming[job.id], now)

    def entered(self, job: Job, now: int) -> None:
        prompt = self.incoming.pop(job.id, None)
        if prompt is not None and prompt.flow is None:
            self._released(prompt)  # all of it was here

    # -- as a source ----------------------------------------------------------------------------------------------------

    def holds(self, keys: Iterable[str], engine_id: str, now: int) -> list[str]:
        """Return the keys that are kept here; their lease begins again at ``now``."""
        held = [key for key in keys if key in self.kept] if engine_id in ("", self.engine_id) else []
        for key in held:
            self.kept[key].until = max(self.kept[key].until, now + self._lease)
        return held

    def release(self, keys: Iterable[str], engine_id: str, time: int | None = None) -> list[str]:
        """Free those that are kept here; returns their keys."""
        released = [key for key in keys if key in self.kept] if engine_id in ("", self.engine_id) else []
        for key in released:
            kept = self.kept.pop(key)
            self._act("release", kept.job, kept.rank, time)
        return released

    def expire(self, now: int) -> None:
        """Free prompts that were not fetched in time."""
        late = [key for key, kept in self.kept.items() if kept.until <= now]
        self.expired += len(late)
        self.release(late, "")

    # -- as a target ----------------------------------------------------------------------------------------------------

    def landed(self, prompt: IncomingPrompt, time: int) -> None:
        """Note that the blocks of ``prompt`` have arrived."""
        assert prompt.job is not None
        self._act("landed", prompt.job, prompt.rank, time)

    def failed(self, prompt: IncomingPrompt) -> None:
        """Note that the blocks of ``prompt`` will never arrive."""
        assert prompt.job is not None
        if self.incoming.pop(prompt.job.id, None) is None:
            self._act("landed", prompt.job, prompt.rank, None)  # it was given up: what it had reserved goes back
            return
        self.recomputed += 1
        self._lost(prompt)


def prompt_sizes(config: MockConfig) -> PromptSizes:
    """Return the transfer sizes between the workers of a fleet."""
    block_bytes = config.engine.bytes_per_block or 0
    return PromptSizes(config.handover, block_bytes, min(spec.block_size for spec in config.engine.specs))


Join = Callable[[int, str, Act, Callable[[IncomingPrompt], None]], WorkerHandovers]
"""Adds a worker, with its number, its name, and its callbacks."""


class FleetHandovers:
    """Hand-over state that the workers of one process share."""

    def __init__(self, config: MockConfig, clock: Clock, supervisor: Supervisor, token: str | None, tls: bool) -> None:
        self.network = LiveNetwork(prompt_sizes(config), clock, config.speed, self._landed)
        self.ends: list[WorkerHandovers] = []
        """By the workers' numbers."""
        self._clock = clock
        self._lease = config.kv_lease_duration
        self._reserves_one = config.handover.reserves == "one"
        self._speed = config.speed
        self._supervisor = supervisor
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._scheme = "https" if tls else "http"
        self._session: Any = None

    def join(self, number: int, label: str, act: Act, lost: Callable[[IncomingPrompt], None]) -> WorkerHandovers:
        """Add a worker."""
        lease = from_seconds(self._lease)
        end = WorkerHandovers(
            number,
            label,
            lease,
            self.network,
            act=act,
            lost=lost,
            released=self._release,
            reserves_one=self._reserves_one,
        )
        self.ends.append(end)
        return end

    # -- fetching -------------------------------------------------------------------------------------------------------

    async def claim(self, wish: TransferWish, target: int) -> IncomingPrompt | None:
        """Return the prompt that ``wish`` asks for, in flight to the worker ``target``; ``None`` if its source doesn't have
        it (any more)."""
        if wish.fetch is None:
            return None
        prompt = self._prompt(wish.fetch, target)
        until = self._clock.now() + from_seconds(self._lease)
        while not await self._ask("claim", prompt):
            if not wish.awaited or self._clock.now() > until:
                return None
            await pause(LOOK)
        return prompt

    async def serve(self, number: int, claim: PromptClaim) -> PromptsHeld:
        """Answer another process that asks about prompts of worker ``number``."""
        end = self.ends[number]
        if claim.what == "release":
            return PromptsHeld(held=end.release(claim.request_ids, claim.engine_id))
        return PromptsHeld(held=end.holds(claim.request_ids, claim.engine_id, self._clock.now()))

    def decline(self, wish: TransferWish | None, target: int) -> None:
        """Decline the prompt that ``wish`` asks for at the worker ``target``."""
        if wish is not None and wish.fetch is not None:
            self._release(self._prompt(wish.fetch, target))

    def _prompt(self, address: PromptAddress, target: int) -> IncomingPrompt:
        local = next((end for end in self.ends if end.address == (address.host, address.port)), None)
        source = PromptSource(label=f"{address.host}:{address.port}") if local is None else local.source
        return IncomingPrompt(source=source, address=address, target=target)

    async def _ask(self, what: ClaimKind, prompt: IncomingPrompt) -> bool:
        """Return true if the source of ``prompt`` has it."""
        address = prompt.address
        claim = PromptClaim(what=what, engine_id=address.engine_id, request_ids=[address.key])
        number = prompt.source.number
        if number is not None:
            return bool((await self.serve(number, claim)).held)
        return await self._post(address, claim)

    async def _post(self, address: PromptAddress, claim: PromptClaim) -> bool:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ASK_SECONDS), trust_env=False)
        try:
            async with self._session.post(
                f"{self._scheme}://{address.host}:{address.port}/kv_transfer",
                data=msgspec.json.encode(claim),
                headers={"content-type": "application/json", **self._headers},
            ) as reply:
                content = await read_body(reply, MOST_BYTES)
                return bool(reply.status == 200 and msgspec.json.decode(content, type=PromptsHeld).held)
        except (aiohttp.ClientError, TimeoutError, OSError, *DECODE_ERRORS):
            return False

    # -- results -------------------------------------------------------------------------------------------------------

    def _landed(self, prompt: IncomingPrompt, landed_at: int) -> None:
        number = prompt.source.number
        if number is not None:
            there = self.ends[number].release([prompt.address.key], prompt.address.engine_id, landed_at)
            end = self.ends[prompt.target]
            if there:
                end.landed(prompt, landed_at)
            else:
                end.failed(prompt)
            return
        # Whether it could be read to its end, the source knows: one that is gone can't be read.
        self._supervisor.begin("the end of a hand-over", self._finish(prompt, landed_at))

    async def _finish(self, prompt: IncomingPrompt, time: int) -> None:
        end = self.ends[prompt.target]
        if await self._ask("release", prompt):
            end.landed(prompt, time)
        else:
            end.failed(prompt)

    def _release(self, prompt: IncomingPrompt) -> None:
        """Release a prompt that needn't be sent."""
        number = prompt.source.number
        if number is not None:
            self.ends[number].release([prompt.address.key], prompt.address.engine_id)
        else:
            self._supervisor.begin("the end of a hand-over", self._release_copy(prompt))

    async def _release_copy(self, prompt: IncomingPrompt) -> None:
        await self._ask("release", prompt)

    def died(self, number: int) -> None:
        """End transfers of a worker that is gone: prompts from it will not come, and prompts to it aren't wanted."""
        for prompt in self.network.of(number):
            self.network.stop(prompt)
            if prompt.target != number:
                self.ends[prompt.target].failed(prompt)

    @property
    def idle(self) -> bool:
        """Return true if nothing is kept for others and nothing is in flight."""
        return self.network.idle and not any(end.kept or end.incoming for end in self.ends)

    # -- leases ---------------------------------------------------------------------------------------------------------

    async def keep_leases(self) -> None:
        """Renew the leases of what waits here, and let those end that weren't renewed."""
        while True:
            await pause(self._lease / RENEWALS / self._speed)
            now = self._clock.now()
            waiting = [prompt for end in self.ends for prompt in end.incoming.values()]
            for prompt, held in zip(
                waiting, await asyncio.gather(*map(partial(self._ask, "renew"), waiting)), strict=True
            ):
                if not held and prompt.flow is not None and prompt.flow.ended is None:
                    self.network.stop(prompt)
                    self.ends[prompt.target].failed(prompt)
            for end in self.ends:
                end.expire(now)

    async def close(self) -> None:
        """Release everything."""
        self.network.close()
        if self._session is not None:
            await self._session.close()
