"""What a replay costs by the size of the fleet: the same load per worker on 8 to 10,000 of them.

The Mooncake conversation trace comes so many times faster as there are more workers than eight, again and again with fresh ids
where it is too short. Every run is a fresh process of what a plain install gives (see ``_plain.py``). CPU time is that of the
whole process but imports and reading nothing: making the fleet, running it, and the report, each by itself.

    python benchmarks/scale.py [--workers 8,64,512] [--policies kv,least-time] [--requests 12000]
    python benchmarks/scale.py --idle                 memory per worker that has seen nothing
    python benchmarks/scale.py --million              a million requests on a thousand workers; fewer with --requests
    python benchmarks/scale.py --peer                 the same trace and fleets on Dynamo's replay, as far as it goes
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from _peers import conversation_trace, peer_python
from _plain import plain_environment

WORKERS = (8, 64, 512, 2048, 10_000)
POLICIES = ("kv", "least-time", "round-robin")
REQUESTS = 12_000
TRACE_REQUESTS = 12_031
USUAL = 8
"""Workers that the trace loads as it was recorded."""
PATIENCE = 1200
"""Seconds that the peer may take for a line."""
ENVIRONMENT: dict[str, str] = {}


def run(point: dict[str, Any]) -> dict[str, Any]:
    """One point in this process."""
    import msgspec

    from kvyard.replay.fleet import Fleet
    from kvyard.replay.garbage import rarely_collected
    from kvyard.replay.report import make_report
    from kvyard.replay.run import as_config
    from kvyard.replay.traces import open_trace
    from kvyard.replay.traces.changes import tiled

    workers, requests = point["workers"], point["requests"]
    trace = tiled(open_trace(conversation_trace()), -(-requests // TRACE_REQUESTS))
    rows = trace if requests % TRACE_REQUESTS == 0 else _first(trace, requests)
    settings = {"workers": workers, "router": point["policy"], "block_size": 64, "num_gpu_blocks": 16384}
    config = as_config(None, {**settings, "speedup": workers / USUAL, "samples": 64})
    before = _resident()
    clock = time.process_time
    times = [clock()]
    fleet = Fleet(config)
    times.append(clock())
    idle = _resident() - before
    if point.get("idle"):
        return {"idle_kb": idle / workers / 1024, "make": times[1] - times[0]}
    fleet.run(rows, partial(_progress, requests) if point.get("progress") else None)
    times.append(clock())
    with rarely_collected():
        report = make_report(fleet)
    times.append(clock())
    return {
        "make": times[1] - times[0],
        "run": times[2] - times[1],
        "report": times[3] - times[2],
        "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "ttft": report.latency["ttft"].mean,
        "ttft_p99": report.latency["ttft"].p99,
        "reuse": report.reuse["all"].value,
        "digest": hashlib.sha256(msgspec.json.encode(report)).hexdigest()[:12],
    }


def _first(trace: Any, requests: int) -> Any:
    from kvyard.replay.run import limited

    return limited(trace, requests)


def _progress(requests: int, read: int, through: int, now: int) -> None:
    if not through % 64:
        print(f"\r{through:,} of {requests:,} through, {now / 1e9:.1f} s", end="", file=sys.stderr, flush=True)


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * resource.getpagesize()


def measure(point: dict[str, Any]) -> dict[str, Any]:
    """One point in a process of its own."""
    command = [sys.executable, __file__, "--point", json.dumps(point)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=ENVIRONMENT)
    if done.returncode:
        sys.exit(f"{point} failed with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def table(workers: list[int], policies: list[str], requests: int) -> None:
    print(
        f"{'policy':12} {'workers':>8} {'requests':>9} {'make s':>7} {'run s':>7} {'report s':>8} {'us/request':>11}"
        f" {'run alone':>10} {'MB':>6}  TTFT ms, p99, reuse, report"
    )
    for policy in policies:
        for count in workers:
            found = measure({"workers": count, "policy": policy, "requests": requests})
            whole = found["make"] + found["run"] + found["report"]
            print(
                f"{policy:12} {count:8} {requests:9} {found['make']:7.2f} {found['run']:7.2f} {found['report']:8.2f}"
                f" {whole / requests * 1e6:11.0f} {found['run'] / requests * 1e6:10.0f} {found['rss']:6.0f}"
                f"  {found['ttft']:.1f}, {found['ttft_p99']:.1f}, {found['reuse']:.4f}, {found['digest']}",
                flush=True,
            )


def peer(workers: list[int], requests: int) -> None:
    """Dynamo's replay of the same requests, ``kv`` on either side. It has the first copy of the trace alone."""
    python = peer_python("dynamo")
    if python is None:
        sys.exit("Dynamo's replay isn't there: make peers")
    for count in workers:
        asked = {
            "trace": "conversation",
            "workers": count,
            "router": "kv_router",
            "block_size": 64,
            "requests": min(requests, TRACE_REQUESTS),
            "speedup": count / USUAL,
        }
        script = Path(__file__).parent / "peers" / "dynamo_replay.py"
        command = [python, str(script), "--conversation", str(conversation_trace()), "--one", json.dumps(asked)]
        command += ["--timeout", str(PATIENCE)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if "TimeoutExpired" in done.stderr:
            print(f"Dynamo kv    {count:8} {asked['requests']:9} not done after {PATIENCE} s", flush=True)
            break
        if done.returncode:
            sys.exit(f"the peer failed:\n{done.stderr[-2000:]}")
        found = json.loads(done.stdout.strip().splitlines()[-1])
        if "cpu_s" not in found:
            print(f"Dynamo kv    {count:8} {asked['requests']:9} failed: {found}", flush=True)
            break
        print(
            f"Dynamo kv    {count:8} {asked['requests']:9} {found['cpu_s']:7.2f} s of CPU, "
            f"{found['cpu_s'] / asked['requests'] * 1e6:.0f} us/request, {found['peak_rss_mb']:.0f} MB, "
            f"TTFT {found['report']['mean_ttft_ms']:.1f} ms",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--workers", default=",".join(map(str, WORKERS)))
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--idle", action="store_true", help="memory per worker that has seen nothing")
    parser.add_argument("--million", action="store_true", help="a million requests on a thousand workers")
    parser.add_argument("--peer", action="store_true", help="Dynamo's replay instead of ours, kv alone")
    parser.add_argument("--source", action="store_true", help="measure the uncompiled checkout, not a plain install")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.point:
        print(json.dumps(run(json.loads(args.point))))
        return
    workers, policies = [int(one) for one in args.workers.split(",")], args.policies.split(",")
    if args.peer:
        peer(workers, args.requests)
        return
    ENVIRONMENT.update(plain_environment(args.source))
    if args.idle:
        for policy in policies:
            for count in workers:
                found = measure({"workers": count, "policy": policy, "requests": 1, "idle": True})
                print(f"{policy:12} {count:8} idle: {found['idle_kb']:8.1f} KB a worker, made in {found['make']:.2f} s")
    elif args.million:
        requests = 1_000_000 if args.requests == REQUESTS else args.requests
        point = {"workers": 1000, "policy": policies[0], "requests": requests, "progress": True}
        found = measure(point)
        whole = found["make"] + found["run"] + found["report"]
        print(
            f"\n{requests:,} requests, 1,000 workers, {policies[0]}: {whole:.0f} s of CPU, {found['rss']:.0f} MB; {found}"
        )
    else:
        table(workers, policies, args.requests)


if __name__ == "__main__":
    main()
