"""Reading prompts: from a request to the names of its prompt's blocks, of which only the end is worked out where its beginning
is known.

Where text may be cut without changing its tokens depends on the tokenizer. Bytes may be cut anywhere. A tokenizer that looks at
words one by one may be cut before the space before a word: see ``TextCutter``. All others read whole texts. What is cut is also
read whole now and then, and if that ever differs, which is logged, nothing is cut from then on.
"""

import asyncio
import logging
import re
import sys
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from kvyard.clock import pause
from kvyard.decode_errors import DECODE_ERRORS
from kvyard.errors import KvyardError
from kvyard.hashing import Namespace
from kvyard.index import Identity
from kvyard.server.gateway.id_lists import cut_ids, read_ids
from kvyard.server.gateway.prefixes import RUN_BYTES, KnownPrefixes, KnownRun, names_of
from kvyard.server.gateway.prompting import PeekedBody, PeekedChat, PeekedPrompt, Prompting, RawPrompt
from kvyard.server.tokens import ByteTokenizer, FileTokenizer, Tokenizer
from kvyard.server.weight import LARGE

log = logging.getLogger(__name__)

LONG_TEXT = 20_000
"""Characters from which on a tokenizer works in a thread of its own, so that streams go on meanwhile."""
TURN = 32_768
"""Tokens that are named before others have their turn."""
SAMPLE = 256
"""One in this many prompts that were read in runs is also read whole."""
FIRST = 4
"""Number of prompts at the start that are also read whole."""
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="reading")
_CUT = re.compile(r"(?<=[A-Za-z0-9]) (?=[A-Za-z])")


class ReadPrompt(msgspec.Struct, frozen=True):
    """A prompt as the router sees it."""

    keys: Sequence[int] = ()
    tokens: int = 0
    tail: Sequence[int] | None = None
    """The tokens behind its last full block; ``None`` if they aren't known."""
    ids: Sequence[int] | None = None
    """All of them, where that was asked for."""
    single: bool = False
    """True if it is the only prompt of its request, and could be read."""


NOTHING = ReadPrompt()
TooLong = Callable[[int], bool]
"""Returns true if a prompt of this many tokens is too long to be named."""


class TextCutter:
    """Cutting of texts for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._whole_bytes = isinstance(tokenizer, ByteTokenizer)
        self.cuts = self._whole_bytes or (isinstance(tokenizer, FileTokenizer) and by_words(tokenizer))
        """True if texts may be cut at all."""
        self._front: tuple[Sequence[int], Sequence[int]] = ((), ())
        """Special tokens around a text."""
        if self.cuts and not self._whole_bytes:
            plain, special = tokenizer.encode("x", False), tokenizer.encode("x", True)
            start = next((start for start in range(len(special)) if special[start : start + len(plain)] == plain), None)
            if start is None:
                self.cuts = False
            else:
                self._front = (special[:start], special[start + len(plain) :])

    def pieces(self, text: str, special: bool) -> tuple[list[bytes | memoryview], Callable[[int], Sequence[int]]]:
        """Return the text in runs and a last piece, as bytes; and a function for the tokens of each."""
        if self._whole_bytes:
            data = memoryview(text.encode("utf-8", "surrogatepass"))
            pieces: list[bytes | memoryview] = [
                data[index : index + RUN_BYTES] for index in range(0, len(data), RUN_BYTES)
            ]
            if not pieces or len(pieces[-1]) == RUN_BYTES:
                pieces.append(data[:0])
            return pieces, lambda index: pieces[index]
        texts: list[str] = []
        begin = 0
        while (cut := _CUT.search(text, begin + RUN_BYTES)) is not None:
            texts.append(text[begin : cut.start()])
            begin = cut.start()
        texts.append(text[begin:])
        front, back = self._front if special else ((), ())
        last = len(texts) - 1

        def tokens(index: int) -> Sequence[int]:
            ids = self._tokenizer.encode(texts[index], False)
            if index == 0 and front:
                ids = [*front, *ids]
            return [*ids, *back] if index == last and back else ids

        return [piece.encode("utf-8", "surrogatepass") for piece in texts], tokens


def by_words(tokenizer: FileTokenizer) -> bool:
    """Return true if a tokenizer makes equal tokens of a text and of its parts, cut before the space before a word: because
    it splits text into words by a rule first, as all byte-level ones do, and no other step looks further.
    """
    described = tokenizer.described
    if (described.get("model") or {}).get("type") not in ("BPE", "WordPiece"):
        return False
    if not _local(described.get("normalizer"), {"NFC", "NFD", "NFKC", "NFKD", "Lowercase"}, "normalizers"):
        return False
    before = described.get("pre_tokenizer")
    if before is None or not _local(before, {"ByteLevel", "Split", "Digits"}, "pretokenizers"):
        return False
    if any(
        pretokenizer.get("add_prefix_space") or pretokenizer.get("invert")
        for pretokenizer in _each(before, "pretokenizers")
    ):
        return False
    if (described.get("truncation"), described.get("padding")) != (None, None):
        return False
    for added in described.get("added_tokens") or ():
        if added.get("lstrip") or added.get("rstrip") or added.get("single_word") or " " in added.get("content", ""):
            return False
    # By its own words: the rule has to end a word there.
    return all(
        tokenizer.splits(text, position) for text, position in (("ab cd", 2), ("a1 cd", 2), ("A\n\n b ab ef", 8))
    )


def _each(part: dict[str, Any], inner: str) -> list[dict[str, Any]]:
    return list(part.get(inner) or ()) if part.get("type") == "Sequence" else [part]


def _local(part: dict[str, Any] | None, fine: set[str], inner: str) -> bool:
    return part is None or all(inner_part.get("type") in fine for inner_part in _each(part, inner))


class PromptReader:
    """Reads the prompts of one pool."""

    def __init__(self, prompting: Prompting, identity: Identity, limit: int) -> None:
        """``limit`` bounds the bytes of cached beginnings."""
        self.prompting = prompting
        self.known = KnownPrefixes(limit)
        self.differed = 0
        """Prompts that read differently in runs and whole."""
        self._identity = identity
        self._cutter = None if prompting.local is None else TextCutter(prompting.local)
        self._samples = self._chats = 0
        self._checking: set[asyncio.Task[None]] = set()

    async def read(
        self, ask: PeekedBody, namespace: Namespace, too_long: TooLong, whole: bool = False, small: bool = False
    ) -> ReadPrompt:
        """Read the prompt of ``ask``; empty if it can't be read. Prompts that are ``too_long``, those for which engines
        read no cache, and those whose blocks can't be named get no names. ``whole``: with all its tokens; ``small``: its body
        is below ``LARGE``.

        Raises ``MsgspecError`` for invalid JSON.
        """
        reads = not isinstance(ask, PeekedPrompt) or ask.reads_cache
        direct, size = self._identity.direct, self._identity.block_size
        heavy = not small and await self.prompting.heavy(ask)
        by_pieces = reads and not whole and not direct
        if heavy and not (by_pieces and self.prompting.flat(ask)):
            return self._unread()
        if by_pieces:
            source = await self.prompting.source(ask)
            if source is not None:
                prompt = await self._read_source(source, namespace, too_long)
                if prompt is not None:
                    if source.ids is None and isinstance(ask, PeekedChat):
                        self._sample_template(ask, namespace, prompt)
                    return prompt
        if heavy:
            return self._unread()
        prompts = await self.prompting.prompts(ask)
        if not prompts:
            return NOTHING
        tokens, ids, single = sum(map(len, prompts)), prompts[0], len(prompts) == 1
        kept = ids if whole else None
        try:
            packed = _packed(ids)
        except KvyardError:
            return ReadPrompt((), tokens, None, kept, single)  # the engine will refuse it
        if not whole and not direct:
            ids = packed  # a search for garbage would look at each number of a list
            del prompts
        unnamed = ReadPrompt((), tokens, ids if len(ids) < size else None, kept, single)
        if not reads or too_long(len(ids)):
            return unnamed
        try:
            if direct:
                keys = self._identity.keys(ids, namespace)
                return ReadPrompt(keys, tokens, ids[len(keys) * size :], kept, single)
            data = memoryview(packed).cast("B")
            pieces = [data[start : start + RUN_BYTES] for start in range(0, len(data), RUN_BYTES)]
            if not pieces or len(pieces[-1]) == RUN_BYTES:
                pieces.append(data[:0])
            step = RUN_BYTES // 4
            prompt = await self._named(
                b"ids", pieces, lambda start: ids[start * step : (start + 1) * step], namespace, too_long
            )
        except KvyardError:
            return unnamed
        return ReadPrompt(prompt.keys, tokens, prompt.tail, kept, single)

    def _unread(self) -> ReadPrompt:
        self.prompting.unread += 1
        return NOTHING

    async def _read_source(self, source: RawPrompt, namespace: Namespace, too_long: TooLong) -> ReadPrompt | None:
        """Return the prompt; ``None`` if it must be read in another way."""
        if source.ids is not None:
            count = source.ids.count(b",") + 1
            if too_long(count):
                return ReadPrompt((), count, single=True)
            pieces = cut_ids(source.ids, RUN_BYTES)
            if max(map(len, pieces)) > 2 * RUN_BYTES:
                return None  # mostly blanks
            try:
                return await self._named(b"json", pieces, lambda index: read_ids(pieces[index]), namespace, too_long)
            except (KvyardError, *DECODE_ERRORS):
                return None  # no list of token ids
        cutter = self._cutter
        if cutter is None or not cutter.cuts:
            return None
        assert source.text is not None
        parts, tokens = cutter.pieces(source.text, source.special)
        if len(source.text) >= LARGE:
            await pause()
        kind = b"text+" if source.special else b"text"
        by_thread = not isinstance(self.prompting.local, ByteTokenizer)
        if not by_thread and too_long(sum(map(len, parts))):
            return ReadPrompt((), sum(map(len, parts)), single=True)
        prompt = await self._named(kind, parts, tokens, namespace, too_long, by_thread)
        if self.prompting.local is not None and not isinstance(self.prompting.local, ByteTokenizer):
            self._sample(self.prompting.local, source, namespace, prompt)
        return prompt

    async def _named(
        self,
        kind: bytes,
        pieces: Sequence[bytes | memoryview],
        tokens_of: Callable[[int], Sequence[int]],
        namespace: Namespace,
        too_long: TooLong,
        by_thread: bool = False,
    ) -> ReadPrompt:
        """Return the names of a prompt of these pieces, the last of which is no full run. Tokens of long texts are made in
        a thread. Raises ``KvyardError`` if they are no token ids.
        """
        if len(pieces) == 1 and not by_thread:
            return self._named_whole(tokens_of(0), namespace, too_long)
        known, identity = self.known, self._identity
        if namespace.lora_name is not None or namespace.salt is not None:
            kind += repr((namespace.lora_name, namespace.salt)).encode("utf-8", "surrogatepass")
        last = len(pieces) - 1
        digests = known.digests(kind, pieces[:last])
        path = known.path(digests)
        done = len(path)
        tokenized: list[Sequence[int]] | None = None
        if by_thread and sum(map(len, pieces[done:])) > LONG_TEXT:
            loop = asyncio.get_running_loop()
            tokenized = await loop.run_in_executor(
                _THREADS, lambda: [tokens_of(index) for index in range(done, last + 1)]
            )
        naming = _BlockNames(identity, namespace, path)
        count = naming.tokens
        known.found += count
        batch: list[Sequence[int]] = []
        """Tokens of runs that have no names yet: those of many are made at once."""
        for index in range(done, last + 1):
            batch.append(tokens_of(index) if tokenized is None else tokenized[index - done])
            count += len(batch[-1])
            if index < last and count - naming.tokens <= TURN:
                continue
            if too_long(count):
                # How long it is, is worth knowing all the same.
                count += sum(len(tokens_of(later)) for later in range(index + 1, last + 1))
                return ReadPrompt((), count, single=True)
            naming.add(batch, index == last)
            batch = []
            if index < last:
                await pause()
        _packed(naming.rest)  # what is behind the last full block was looked at by nothing yet
        known.read += count
        if naming.runs:
            known.add(digests[done:], naming.runs)
        return ReadPrompt(names_of(path, naming.names), count, naming.rest, single=True)

    def _named_whole(self, ids: Sequence[int], namespace: Namespace, too_long: TooLong) -> ReadPrompt:
        """Return the names of a prompt that is shorter than a run: of those nothing is kept."""
        count = len(ids)
        if too_long(count):
            return ReadPrompt((), count, single=True)
        named = count // self._identity.block_size * self._identity.block_size
        names = array("Q", self._identity.keys_after(None, 0, ids[:named], namespace))
        rest = ids[named:]
        _packed(rest)
        self.known.read += count
        return ReadPrompt(names, count, tuple(rest), single=True)

    # -- looking again --------------------------------------------------------------------------------------------------

    def _sample(self, local: Tokenizer, source: RawPrompt, namespace: Namespace, prompt: ReadPrompt) -> None:
        """Compare a sample of prompts read in runs with the whole, later and in a thread."""
        self._samples += 1
        if self._samples > FIRST and self._samples % SAMPLE:
            return
        task = asyncio.get_running_loop().create_task(self._check(local, source, namespace, prompt))
        self._checking.add(task)
        task.add_done_callback(self._checking.discard)

    def _sample_template(self, ask: PeekedChat, namespace: Namespace, prompt: ReadPrompt) -> None:
        """Compare, from time to time, a conversation that was rendered here with an engine's rendering."""
        if self.prompting.template is None:
            return
        self._chats += 1
        if self._chats <= FIRST or not self._chats % SAMPLE:
            task = asyncio.get_running_loop().create_task(self._check_template(ask, namespace, prompt))
            self._checking.add(task)
            task.add_done_callback(self._checking.discard)

    async def _check_template(self, ask: PeekedChat, namespace: Namespace, prompt: ReadPrompt) -> None:
        ids = await self.prompting.by_engine(ask)
        if ids is None or self.prompting.template is None:
            return  # no engine says
        keys = self._identity.keys(ids, namespace)
        if prompt.tokens == len(ids) and list(prompt.keys) == keys:
            return
        self.differed += 1
        log.warning(
            "the chat template of %s gives other tokens than the engine's (%d and %d): engines are asked from now on",
            *(self.prompting.how, prompt.tokens, len(ids)),
        )
        self.prompting.template = None

    async def _check(self, local: Tokenizer, source: RawPrompt, namespace: Namespace, prompt: ReadPrompt) -> None:
        assert source.text is not None
        loop = asyncio.get_running_loop()
        try:
            ids = await loop.run_in_executor(_THREADS, local.encode, source.text, source.special)
            keys = self._identity.keys(ids, namespace)
        except (KvyardError, RuntimeError):
            return
        tail = ids[len(keys) * self._identity.block_size :]
        if prompt.tokens == len(ids) and list(prompt.keys) == keys and list(prompt.tail or ()) == tail:
            return
        self.differed += 1
        if self._cutter is not None and self._cutter.cuts:
            log.warning(
                "%s tokenizes a text differently from its parts (%d and %d tokens): texts are tokenized whole from now on",
                *(self.prompting.how, len(ids), prompt.tokens),
            )
            self._cutter.cuts = False
        self.known.clear()


class _BlockNames:
    """Names of a prompt's blocks behind the runs that are known, made as its tokens come."""

    __slots__ = ("_identity", "_namespace", "_parent", "names", "rest", "runs", "tokens")

    def __init__(self, identity: Identity, namespace: Namespace, path: Sequence[KnownRun]) -> None:
        self._identity = identity
        self._namespace = namespace
        named = next((run.names for run in reversed(path) if run.names), None)
        self._parent = None if named is None else int.from_bytes(named[-8:], sys.byteorder)
        self.tokens, self.rest = (path[-1].tokens, path[-1].rest) if path else (0, ())
        """Tokens so far, and those of them behind the last full block."""
        self.names: list[bytes] = []
        self.runs: list[KnownRun] = []

    def add(self, batch: Sequence[Sequence[int]], ends: bool) -> None:
        """Take in the tokens of the next runs; if the prompt ``ends`` with them, the last of them is no run."""
        size = self._identity.block_size
        start = self.tokens - len(self.rest)
        ready = _joined(self.rest, batch)
        whole = len(ready) // size * size
        names = array("Q", self._identity.keys_after(self._parent, start, ready[:whole], self._namespace)).tobytes()
        if names:
            self._parent = int.from_bytes(names[-8:], sys.byteorder)
        self.names.append(names)
        end, block = len(self.rest), 0
        for ids in batch[:-1] if ends else batch:
            end += len(ids)
            blocks = end // size
            self.runs.append(KnownRun(names[8 * block : 8 * blocks], start + end, tuple(ready[blocks * size : end])))
            block = blocks
        self.rest = tuple(ready[whole:])
        self.tokens = start + len(ready)


def _packed(ids: Sequence[int]) -> "array[int]":
    try:
        return array("I", ids)
    except (OverflowError, TypeError):
        raise KvyardError("token ids must be whole numbers from 0 to 4294967295") from None


def _joined(rest: Sequence[int], batch: Sequence[Sequence[int]]) -> Sequence[int]:
    """``rest`` and the tokens of ``batch``, packed. Raises ``KvyardError`` if they are no token ids."""
    if len(batch) == 1 and not len(rest):
        return batch[0]
    if isinstance(batch[0], memoryview):
        return memoryview(b"".join([bytes(rest), *batch]))  # type: ignore[list-item]
    tokens = _packed(rest)
    for ids in batch:
        tokens.extend(_packed(ids))
    return tokens
