"""A newcomer finds the tests of a module: files mirror modules or belong to a named suite, and nothing sleeps."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
SOURCE = TESTS.parent / "src" / "kvyard"
FOLDERS = {"deploy", "fuzz", "hostile", "real", "server/soak"}
"""Suites that are folders of their own; CONTRIBUTING.md says what each suite is."""
SUITES = {"docs", "fuzz", "scenarios", "soak", "state_machine"}
"""Suites of a package: ``test_docs.py`` and the like."""
WHOLE = {"compiled", "conftest", "console_blocks", "extending", "layers", "layout", "references", "release"}
"""Suites about the whole tree, at the top."""
SLEEPS = {
    "cli/test_doctor.py": "an interrupt at a given time",
    "events/transport/held_up.py": "a process that is stopped",
    "events/transport/test_publisher_sockets.py": "a task that is cancelled",
    "hostile": "memory comes back in a while",
    "index/redis/test_shared_partitions.py": "random instants of faults",
    "index/redis/test_shared_recovery.py": "for a while no answer promises too much",
    "index/test_indexer_wire.py": "batches come apart",
    "lab/calibrate/test_probing.py": "an engine that takes time",
    "lab/jobs/test_cluster.py": "a node is killed in the middle of a replay",
    "lab/jobs/test_local.py": "time for a signal to arrive",
    "real": "engines that take minutes to start",
    "server/dashboard/test_routes.py": "nothing happens for a while",
    "server/gateway/scripted_engine.py": "an engine that takes time",
    "server/gateway/test_connections.py": "longer than the limit of silence",
    "server/indexer/test_service.py": "batches come apart",
    "server/soak": "random instants of faults",
    "server/test_connection.py": "bytes come apart, or don't come for a while",
    "waiting.py": "between two probes",
}
"""Files, or folders, that sleep for a time, and what for."""


def modules(folder: Path) -> set[str]:
    """Names of the modules and packages of the source folder that ``folder`` mirrors, and of that package itself."""
    mirrored = SOURCE / folder.relative_to(TESTS)
    names = {path.stem for path in mirrored.glob("*.py")} | {path.name for path in mirrored.glob("*/")}
    return {*names, *({mirrored.name} if folder != TESTS else ())}


def test_every_file_mirrors_a_module_or_belongs_to_a_suite() -> None:
    astray = []
    for path in sorted(TESTS.rglob("test_*.py")):
        folder, name = path.parent, path.stem.removeprefix("test_")
        if any(path.is_relative_to(TESTS / suite) for suite in FOLDERS):
            continue
        suites = SUITES | (WHOLE if folder == TESTS else set())
        if not any(name == known or name.startswith(f"{known}_") for known in modules(folder) | suites):
            astray.append(str(path.relative_to(TESTS)))
    assert not astray, "name them after the module they test, as test_MODULE.py or test_MODULE_ASPECT.py"


def test_nothing_sleeps_where_it_could_probe() -> None:
    sleeping = re.compile(r"(?:time|asyncio)\.sleep\((?!0\))")
    found = {path for path in TESTS.rglob("*.py") if sleeping.search(path.read_text())}
    known = {
        path for name in SLEEPS for path in ([TESTS / name] if name.endswith(".py") else (TESTS / name).rglob("*.py"))
    }
    astray = sorted(str(path.relative_to(TESTS)) for path in found - known)
    assert not astray, "wait by tests.waiting.eventually"
    assert all(found & {path for path in known if path.is_relative_to(TESTS / name)} for name in SLEEPS)
