"""Run vLLM's own tests of its scheduler and KV cache manager with kvyard's in their place.

    make test-real ARGS=vllm-suite
    build/peers/vllm/bin/python scripts/vllm_suite/run.py [--only TESTS] [--classes vllm|kvyard] [--connectors] [--http]

The tests come with vLLM's source distribution, which is fetched from PyPI into ``build/vllm-suite``; nothing of it is kept in
this repository. They are run twice: with vLLM's own classes, to see which tests can pass in this environment, then with
``kvyard.vllm``'s scheduler and manager. The table has per file the tests, those that are applicable (they pass with vLLM's
classes), and those of them that pass with kvyard's; ``manager`` counts those in which a kvyard manager was at work. Exit code 1
if fewer than 90 % of the applicable tests pass, or one fails without an explanation (``explanations.py``).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from explanations import explain

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PLACE = ROOT / "build" / "vllm-suite"
VERSION = "0.32.0"
INDEX = "https://pypi.org/simple/vllm/"
CORE = "tests/v1/core"
CONNECTORS = "tests/v1/kv_connector/unit"
REACHES = re.compile(r"\b(create_scheduler|request_runner|KVCacheManager|LLM)\(|\bmake_scheduler\b|\brequest_runner\b")
"""In a test of connectors that has a scheduler or a manager, whose place kvyard's can take; others test the connector alone."""
MOONCAKE = f"{CONNECTORS}/test_mooncake_connector.py"
WITH_SCHEDULER = ("test_basic_interface", "test_prompt_less_than_block_size", "test_scheduler_request_finished")
"""All of ``MOONCAKE`` that is run: of those of its worker, one doesn't end without a GPU, and one ends the process."""
HTTP = "tests/entrypoints/openai/test_openai_schema.py"
WANTED = 0.9
"""Share of the applicable tests that must pass."""
SECONDS = 3600
"""What all tests together may take, or one that asks every route of a server; ..."""
TEST_SECONDS, LATE_TEST_SECONDS = 120, 600
"""... and any other test, first and when it is run again since it wasn't done in time."""

Outcome = dict[str, Any]


def fetch() -> Path:
    """Fetch vLLM's tests, unless they are there."""
    folder = PLACE / f"vllm-{VERSION}"
    if folder.exists():
        return folder
    PLACE.mkdir(parents=True, exist_ok=True)
    page = urllib.request.urlopen(INDEX, timeout=60).read().decode()
    link = re.search(rf'href="([^"]*/vllm-{re.escape(VERSION)}\.tar\.gz)#sha256=([0-9a-f]+)"', page)
    if link is None:
        raise SystemExit(f"vllm-suite: {INDEX} lists no source distribution of vLLM {VERSION}")
    print(f"vllm-suite: fetching {link[1]}", flush=True)
    data = urllib.request.urlopen(link[1], timeout=600).read()
    if hashlib.sha256(data).hexdigest() != link[2]:
        raise SystemExit(f"vllm-suite: {link[1]} is damaged: run it again")
    archive = PLACE / "vllm.tar.gz"
    archive.write_bytes(data)
    # Tests only: the package itself is the one that is installed.
    kept = (f"{folder.name}/tests/", f"{folder.name}/pyproject.toml")
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):  # Python before 3.11.4 has none
            tar.extraction_filter = tarfile.data_filter
        tar.extractall(PLACE, [each for each in tar if each.name.startswith(kept)])
    archive.unlink()
    return folder


def connector_tests(folder: Path) -> list[str]:
    """Files of ``CONNECTORS`` in which a scheduler or a manager is at work, and tests of ``MOONCAKE``."""
    files = sorted((folder / CONNECTORS).rglob("test_*.py"))
    chosen = [str(file.relative_to(folder)) for file in files if REACHES.search(file.read_text())]
    chosen.remove(MOONCAKE)
    return chosen + [f"{MOONCAKE}::{test}" for test in WITH_SCHEDULER]


def run(folder: Path, classes: str, tests: list[str]) -> dict[str, Outcome]:
    """Run ``tests`` with the ``classes`` of vLLM or kvyard; returns what became of each."""
    for kind in ("jsonl", "log"):
        (PLACE / f"{classes}.{kind}").unlink(missing_ok=True)
    pytest(folder, classes, tests, SECONDS if classes == "mock" else TEST_SECONDS)
    outcomes = read(classes)
    late = [test for test, outcome in outcomes.items() if "Timeout" in outcome["reason"]]
    if late:  # on a busy machine; some have limits of their own
        pytest(folder, classes, late, LATE_TEST_SECONDS)
    return read(classes)


def pytest(folder: Path, classes: str, tests: list[str], seconds: int) -> None:
    """Run ``tests``, each for ``seconds`` at most, and append what became of them to the file of these classes."""
    environment = {
        **os.environ,
        "HF_HOME": str(PLACE / "hf"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "KVYARD_SUITE_CLASSES": classes,
        "KVYARD_SUITE_OUT": str(PLACE / f"{classes}.jsonl"),
        "KVYARD_SUITE_MOCK": str(ROOT / ".venv" / "bin" / "kvyard"),
        "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT / "src"), str(folder)]),
    }
    command = [sys.executable, "-m", "pytest", "-p", "plugin", "-q", "--tb=short", "-p", "no:cacheprovider"]
    command += ["--continue-on-collection-errors", f"--timeout={seconds}", *tests]
    log = (PLACE / f"{classes}.log").open("a")
    print(f"vllm-suite: {' '.join(tests)} with {classes}'s classes; {log.name} has what pytest prints", flush=True)
    done = subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log, timeout=SECONDS, check=False)
    if done.returncode not in (0, 1):
        print(f"vllm-suite: pytest ended with {done.returncode}: what comes after {_last(classes)} was not run")


def read(classes: str) -> dict[str, Outcome]:
    """The outcomes of the last run with these classes; none before the first."""
    file = PLACE / f"{classes}.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return {line["test"]: line for line in map(json.loads, lines)}


def _last(classes: str) -> str:
    return next(reversed(read(classes)), "the start")


def report(theirs: dict[str, Outcome], ours: dict[str, Outcome]) -> int:
    """Print the table; returns the exit code."""
    files = sorted({test.split("::")[0] for test in theirs})
    total: Counter[str] = Counter()
    left_out: Counter[tuple[str, str]] = Counter()
    failed: Counter[str] = Counter()
    unexplained: list[str] = []
    print("| file | tests | not applicable | applicable | passed | failed | manager |")
    print("|---|---|---|---|---|---|---|")
    for file in files:
        count: Counter[str] = Counter()
        for test, outcome in theirs.items():
            if test.split("::")[0] != file:
                continue
            count["tests"] += 1
            if outcome["outcome"] != "passed":
                count["left out"] += 1
                left_out[file, explain(test, outcome["reason"]) or outcome["reason"].splitlines()[0][:160]] += 1
                continue
            count["applicable"] += 1
            mine = ours.get(test, {"outcome": "missing", "reason": "it was not run", "managers": 0})
            count["manager"] += bool(mine["managers"])
            if mine["outcome"] == "passed":
                count["passed"] += 1
                continue
            count["failed"] += 1
            why = explain(test, mine["reason"])
            failed[why or "unexplained"] += 1
            if why is None:
                unexplained.append(f"{test}: {' '.join(mine['reason'].split())[:200]}")
        total.update(count)
        row = [count[name] for name in ("tests", "left out", "applicable", "passed", "failed", "manager")]
        print(f"| {file.removeprefix('tests/v1/')} | {' | '.join(map(str, row))} |")
    row = [total[name] for name in ("tests", "left out", "applicable", "passed", "failed", "manager")]
    print(f"| all | {' | '.join(map(str, row))} |")
    share = total["passed"] / max(1, total["applicable"])
    print(f"\n{total['passed']} of {total['applicable']} applicable tests pass: {share:.1%}")
    for (file, why), count_ in sorted(left_out.items()):
        print(f"not applicable: {count_} of {file}: {why}")
    for why, count_ in failed.most_common():
        print(f"failed: {count_}: {why}")
    for line in unexplained:
        print(f"unexplained: {line}")
    return int(share < WANTED or bool(unexplained))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="TESTS", help="these instead of all, as pytest names them")
    parser.add_argument(
        "--classes", choices=["vllm", "kvyard"], help="one of the two runs; the other's outcomes are kept"
    )
    parser.add_argument(
        "--connectors", action="store_true", help=f"files of {CONNECTORS} with a scheduler, instead of {CORE}"
    )
    parser.add_argument("--http", action="store_true", help=f"{HTTP}, which asks kvyard mock; no other run is needed")
    args = parser.parse_args()
    folder = fetch()
    subprocess.run([sys.executable, HERE / "models.py", PLACE / "hf"], check=True)
    if args.http:
        outcomes = run(folder, "mock", [HTTP])
        for test, outcome in outcomes.items():
            print(f"{outcome['outcome']}: {test} {outcome['reason']}".rstrip())
        return int(not outcomes or any(outcome["outcome"] != "passed" for outcome in outcomes.values()))
    tests = args.only or (connector_tests(folder) if args.connectors else [CORE])
    for classes in ("vllm", "kvyard"):
        if args.classes in (None, classes):
            run(folder, classes, tests)
    return report(read("vllm"), read("kvyard"))


if __name__ == "__main__":
    sys.exit(main())
