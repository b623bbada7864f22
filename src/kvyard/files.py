"""Output of commands: files that appear under their names once they are whole, pipes, devices, and stdout.

One rule for all commands. A result can be computed again, so a regular file is overwritten: at once, as a whole, with the
permissions it had, and at the place that a symbolic link leads to. What isn't a regular file (a pipe, a device) is written
to and stays what it is. ``-`` is stdout, as is ``/dev/stdout``. A recording can't be made again: it overwrites no file
(``open_new``).
"""

import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from errno import EBUSY, EXDEV
from itertools import count
from pathlib import Path
from shutil import copyfile, copyfileobj, copymode
from tempfile import TemporaryFile
from typing import IO, Any, Literal

import msgspec

from kvyard.errors import KvyardError

STDOUT = "-"
MOST_LINKS = 40
"""Links that lead to links are followed so often; Linux does the same."""


IsWhole = Callable[[], bool]
"""Predicate that is true if a written result is complete."""


def always() -> bool:
    """Return true."""
    return True


def partial_name(path: str | Path) -> Path:
    """Return the name for an incomplete result: ``requests.partial.jsonl``."""
    path = Path(path)
    return path.with_name(f"{path.stem}.partial{path.suffix}")


@contextmanager
def whole_file(path: str | Path, is_whole: IsWhole = always) -> Iterator[IO[bytes]]:
    """A file to write, by the rule above; of a regular one nothing is left if that fails. Raises ``KvyardError``.

    Where ``is_whole`` denies it in the end, a regular one appears as ``partial_name(path)``, and what was at ``path`` stays;
    nothing appears in a directory that takes no new files.
    """
    check_writable(path)
    try:
        number = _descriptor(path)
        if number is not None:
            with _opened(number) as file:
                yield file
            return
        if _is_special(path):
            with open(path, "wb") as device:
                yield device
            return
        yield from _replaced(Path(os.path.realpath(path)), is_whole)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise KvyardError(f"can't write {name_of(path)}: {error.strerror or error}") from None


def write_whole(path: str | Path, data: bytes | str) -> None:
    """Write a file in one go. Raises as ``whole_file`` does."""
    with whole_file(path) as file:
        file.write(data.encode("utf-8", "replace") if isinstance(data, str) else data)


def encode_json(value: object, order: Literal["deterministic", "sorted"] | None = None) -> bytes:
    """Return ``value`` as JSON. Names of files needn't be UTF-8: what isn't becomes a replacement character."""
    try:
        return msgspec.json.encode(value, order=order)
    except UnicodeEncodeError:
        return msgspec.json.encode(_encodable(msgspec.to_builtins(value, order=order)), order=order)


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace") if not value.isascii() else value
    if isinstance(value, list | tuple):
        return [_encodable(item) for item in value]
    if isinstance(value, dict):
        return {_encodable(name): _encodable(item) for name, item in value.items()}
    return value


def open_new(path: str | Path) -> IO[bytes]:
    """Return a file to write what can't be made again. Raises ``KvyardError`` where a regular file is there already."""
    try:
        number = _descriptor(path)
        if number is not None:
            return os.fdopen(os.dup(number), "wb")
        return open(path, "wb" if _is_special(path) else "xb")
    except FileExistsError:
        raise KvyardError(f"{path} exists: choose another name, or remove it") from None
    except OSError as error:
        raise KvyardError(f"can't write {path}: {error.strerror}") from None


def check_writable(path: str | Path) -> None:
    """Raise ``KvyardError`` where a result can't be written there, before there is anything to write."""
    if not str(path) or "\0" in str(path):
        raise KvyardError(f"can't write {str(path)!r}: it is no name of a file")
    try:
        if _descriptor(path) is not None:
            return
        target = Path(os.path.realpath(path))
        if target.is_dir():
            raise KvyardError(f"can't write {path}: it is a directory")
        if _is_special(path):
            writable = os.access(path, os.W_OK)
        elif not target.parent.is_dir():
            raise KvyardError(f"can't write {path}: there is no directory {target.parent}; make it first")
        else:
            writable = os.access(target if target.exists() else target.parent, os.W_OK)
    except OSError as error:
        raise KvyardError(f"can't write {path}: {error.strerror}") from None
    if not writable:
        raise KvyardError(f"can't write {path}: it isn't yours to write to")


def check_outputs(*paths: str | Path | None, reads: Iterable[str | Path] = ()) -> None:
    """``check_writable`` for all that are given. Raises ``KvyardError`` also where two are one, or one is what is read."""
    known: dict[object, str] = {_place(read): "what is read" for read in reads}
    for path in paths:
        if path is None:
            continue
        check_writable(path)
        place = _place(path)
        if place in known:
            raise KvyardError(f"can't write {name_of(path)}: it is {known[place]} as well; choose another")
        if place is not None:
            known[place] = "another output"


def is_stdout(path: str | Path | None) -> bool:
    """Return true if writing to ``path`` goes to this process's stdout."""
    return path is not None and _descriptor(path) == 1


def is_regular(path: str | Path) -> bool:
    """Return true if ``path`` is, or would become, a regular file, so that its suffix can choose a format."""
    return _descriptor(path) is None and not _is_special(path)


def name_of(path: str | Path) -> str:
    """Return the name of an output for messages."""
    return "stdout" if is_stdout(path) else str(path)


def _replaced(target: Path, is_whole: IsWhole) -> Iterator[IO[bytes]]:
    """Yield a new file beside ``target`` that takes its place in the end, or its partial name."""
    there = target.exists()
    if there and not os.access(target.parent, os.W_OK):
        with TemporaryFile(prefix="kvyard-") as kept:  # what is there stays until there is something to take its place
            yield kept
            if is_whole():
                kept.seek(0)
                with target.open("wb") as old:
                    copyfileobj(kept, old)
        return
    part, file = _part_of(target)
    try:
        with file:
            yield file
        if not is_whole():
            os.replace(part, partial_name(target))
            return
        if there:
            copymode(target, part)
        try:
            os.replace(part, target)
        except OSError as error:
            if error.errno not in (EBUSY, EXDEV):
                raise
            copyfile(part, target)  # mounted into a container as a single file, it can be written but not replaced
    finally:
        part.unlink(missing_ok=True)


def _part_of(target: Path) -> tuple[Path, IO[bytes]]:
    """Create a new file beside ``target`` and return it with its path. A killed process leaves its file behind, and in a
    container the next process has the same number: an existing file may be stale, or belong to another container that is
    still writing.
    """
    for number in count():
        more = f".{number}" if number else ""
        part = target.with_name(f"{target.name[:200]}.{os.getpid()}{more}.part")
        with suppress(FileExistsError):
            return part, part.open("xb")
    raise AssertionError("unreachable: numbers don't end")


def _descriptor(path: str | Path) -> int | None:
    """Return the open file of this process that ``path`` stands for: 1 for ``-`` and ``/dev/stdout``; ``None`` for
    other names.
    """
    if str(path) == STDOUT:
        return 1
    target = os.path.abspath(path)
    for _ in range(MOST_LINKS):
        folder, name = os.path.split(target)
        if name.isdecimal() and os.path.realpath(folder) == os.path.realpath("/proc/self/fd"):
            return int(name)
        if not os.path.islink(target):
            return None
        target = os.path.join(folder, os.readlink(target))
    return None


@contextmanager
def _opened(number: int) -> Iterator[IO[bytes]]:
    """An open file of this process, after what was printed to it so far. It stays open, and where it is."""
    stream = {1: sys.stdout, 2: sys.stderr}.get(number)
    if stream is None:
        with os.fdopen(os.dup(number), "wb") as file:
            yield file
        return
    stream.flush()
    yield stream.buffer
    stream.buffer.flush()


def _is_special(path: str | Path) -> bool:
    """Return true if ``path`` exists and is neither a regular file nor a directory."""
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _place(path: str | Path) -> object:
    """Return an identity that is equal for two names of one regular file; of everything else only stdout has one."""
    number = _descriptor(path)
    if number is not None:
        return number
    try:
        return None if _is_special(path) else os.path.realpath(path)
    except OSError:
        return None
