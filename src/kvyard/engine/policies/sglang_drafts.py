"""The decode batch of SGLang with draft tokens: every request verifies drafts in every pass.

Each holds slots for the drafts of two passes beyond its computed tokens, since with overlap a pass is decided on before it is
known how many drafts of the one before were accepted. In a pass that computes prompts, too, a request computes one token.
"""

from kvyard.blocks.radix import Held, held_of
from kvyard.engine.config import EngineConfig
from kvyard.engine.job import Job, JobState
from kvyard.engine.lifecycle import Lifecycle
from kvyard.engine.passes import Chunk, Pass
from kvyard.engine.policies.sglang_decoding import DecodeSide
from kvyard.engine.policies.sglang_queue import WaitingQueue
from kvyard.engine.speculative import ReservedDrafts
from kvyard.integers import ceil_div


class DraftSide(DecodeSide):
    """Requests that verify drafts."""

    def __init__(self, jobs: Lifecycle, config: EngineConfig, waiting: WaitingQueue, drafts: ReservedDrafts) -> None:
        super().__init__(jobs, config, waiting)
        self._drafts = drafts
        jobs.blocks.headroom = False
        tracking = self._states.tracking if self._states is not None else None
        self._lazy = tracking is not None and tracking.lazy
        if self._states is not None:
            drafts.verifying = self._note_state

    def taking_part(self, extended: list[Job]) -> list[Job]:
        return [job for job in [*extended, *self.running] if job.state is JobState.DECODE]

    def passed(self) -> int:
        return 0  # there are no plans

    def reorder(self) -> None:
        self.jobs.renumber(self.running)

    def _note_state(self, job: Job, accepted: int) -> None:
        """Note what is kept of the states of ``job``, which gets ``accepted`` tokens: those beyond its answer are in them,
        too.
        """
        assert self._states is not None
        held, tracking = held_of(job.tables[0]), self._states.tracking
        before = job.num_tokens - 1
        after = before + accepted
        if tracking is None:
            held.cut = not job.aborted and after > job.num_tokens + job.remaining
            return
        state = after // tracking.interval * tracking.interval
        if tracking.lazy:
            ends = job.aborted or accepted >= job.remaining
            self._note_lazily(held, held.planned.pop(0), after, state if state > before else 0, ends=ends)
        elif state > before:
            # Without overlap there is one slot, and the state before is gone.
            held.kept = (state, held.kept[0] if self.ahead else 0)

    def _note_lazily(self, held: Held, place: int, tokens: int, state: int, *, ends: bool) -> None:
        """A pass that was to write to ``place`` brings a request to ``tokens`` tokens, past ``state`` if that isn't 0."""
        assert self._states is not None
        if ends:
            # What it wrote is not kept; if that was, or may be, written over the state that was, nothing is.
            if (state and place == held.place) or (not held.writing and self._may_write(tokens)):
                held.kept = (0, 0)
        elif state:
            if place != held.place:
                self._free_written([(held, state)])
                held.place = place
            held.kept = (state, 0)

    def _may_write(self, tokens: int) -> bool:
        """Return true if two passes may bring a request with ``tokens`` computed tokens to a state."""
        assert self._states is not None
        assert self._states.tracking is not None
        interval = self._states.tracking.interval
        return tokens // interval != (tokens + 2 * self._drafts.width) // interval

    def _plan_states(self) -> None:
        """Take a slot for each state that the pass being formed, or the one in flight, may write."""
        states = self._states
        assert states is not None
        for job in self.running:
            held = held_of(job.tables[0])
            writes = self._may_write(job.num_computed_tokens)
            if writes and not held.writing:
                if states.free:
                    states.free -= 1
                    held.writing = 1
                else:
                    held.kept, held.track = (0, 0), 0
            held.planned.append(1 - held.place if writes and held.writing else held.place)

    def mix(self) -> bool:
        mixed = super().mix()
        if mixed and self._lazy:
            for job in self.running:
                held_of(job.tables[0]).planned.pop()  # no states of answers are written
        return mixed

    def abort(self, job: Job) -> None:
        job.aborted = True

    def parts(self, job: Job) -> bool:
        return job.aborted

    def computed(self, job: Job) -> int:
        return job.num_computed_tokens

    def aside(self) -> float:
        aside = 0.0
        for job in self.running:
            aside += self.aside_for(job)
        return aside

    def remaining(self, job: Job) -> int:
        return job.wanted - job.output

    def make_pass(self, chunks: list[Chunk], passes: int) -> Pass:
        tokens = 1 if chunks else self._drafts.width
        drafted = [(job, tokens) for job in self.running]
        lengths = [job.num_computed_tokens + tokens for job in self.running]
        return Pass(chunks, len(drafted), sum(lengths), max(lengths, default=0), drafted)

    def _leave_ending(self) -> bool:
        """Requests whose last token is surely in flight leave the batch."""
        if not self.ahead or not self.jobs.in_flight:
            return False
        launched = self.jobs.in_flight[-1]
        in_flight = {job for job, _ in launched.decided.drafted} | set(launched.first)
        still = [job for job in self.running if job not in in_flight or job.output + 1 < job.max_tokens]
        ending = len(still) < len(self.running)
        if ending:
            self.running, self.full = still, False
        return ending

    def _due(self) -> list[Job]:
        return list(self.running)

    def _put_off(self, due: list[Job]) -> None:
        """Nothing was taken for them."""

    def _pages(self, due: list[Job]) -> int:
        page, reserve = self.page, self._drafts.reserve
        needed = [ceil_div(job.num_computed_tokens + reserve, page) - job.tables[0].length for job in due]
        return sum([pages for pages in needed if pages > 0])

    def _take(self, due: list[Job]) -> None:
        """Take the slots that jobs are to have. With pages of several tokens, SGLang evicts for a page more of each."""
        manager, page, reserve = self.jobs.manager, self.page, self._drafts.reserve
        if self._lazy:
            self._plan_states()
        if self.windows is not None:
            self._slide()
        if page > 1 and self.tree is not None:
            tokens = 0
            for job in due:
                table = job.tables[0]
                slots = table.length * page if held_of(table).drafts else job.num_computed_tokens
                tokens += max(0, ceil_div(job.num_computed_tokens + reserve, page) * page - slots)
            if tokens:
                manager.pool.radix.make_room(ceil_div(tokens + len(due) * page, page))
        for job in due:
            taken = manager.allocate(job, 1, lookahead=reserve - 1)
            assert taken is not None, f"{job} was left without a page"
            held_of(job.tables[0]).drafts = True
