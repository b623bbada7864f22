#!/usr/bin/env python3
"""Peer numbers: Dynamo's KV index as reachable from Python (PyPI wheel).

Two published surfaces of ``ai-dynamo-runtime`` are measured; no source needed.

radix      ``dynamo.llm.RadixTree`` - the in-process binding.  Every call hops
           to a background thread; events are passed as JSON bytes.
selection  ``dynamo.llm.SelectionService`` - the newer embedded service
           (thread-pool indexer over the concurrent compressed radix tree),
           fed with msgpack KV events over ZMQ PUB/SUB, queried with
           ``overlap_scores``.  Needs ``pyzmq`` and ``msgpack``.

The workload is deterministic (splitmix64) so another index can replay it:
``groups`` shared prefixes of ``prefix`` blocks, a catalogue of sequences of
``seq_len`` blocks that start with one of those prefixes, each sequence stored
on ``replicas`` workers until every worker holds about ``blocks`` blocks.
Stores arrive in events of ``chunk`` blocks chained by parent hash.  Queries
are catalogue sequences cut to ``depth`` blocks (hit), with the second half
replaced by unknown blocks (half), or unknown from block 0 (miss).

    python dynamo_index.py --blocks 10000 --workers 64
    python dynamo_index.py --api selection --workers 16 --blocks 10000

One JSON line per run.  ``blocks_per_s`` counts worker-blocks applied; timing
covers only the call into the wheel (event encoding is excluded and reported
separately); best of ``rounds``.  ``bytes_per_block`` is resident-set growth divided by the
worker-blocks stored.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import sys
import time

os.environ.setdefault("DYN_LOG", "error")
MASK = (1 << 64) - 1


def mix(x):
    """splitmix64 finaliser: a portable, seedable 64-bit hash."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def rss_bytes():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def quantile(sorted_vals, q):
    return sorted_vals[min(len(sorted_vals) - 1, int(q * len(sorted_vals)))]


def lat_us(samples):
    s = sorted(samples)
    return {
        "p50_us": round(quantile(s, 0.50) * 1e6, 1),
        "p90_us": round(quantile(s, 0.90) * 1e6, 1),
        "p99_us": round(quantile(s, 0.99) * 1e6, 1),
        "max_us": round(s[-1] * 1e6, 1),
    }


class Workload:
    """Deterministic catalogue of block-hash chains and their placement."""

    def __init__(self, a):
        self.a = a
        per_worker = max(1, a.blocks // a.seq_len)
        self.sequences = max(1, a.workers * per_worker // a.replicas)
        # sequence s lives on `replicas` consecutive workers
        self.placement = [[] for _ in range(a.workers)]
        for s in range(self.sequences):
            for r in range(a.replicas):
                self.placement[(s * a.replicas + r) % a.workers].append(s)

    def local(self, s):
        """Per-block content hashes of sequence s (shared group prefix first)."""
        a = self.a
        g = mix(s) % a.groups
        return [mix(0x1000000 + g * 4096 + i) for i in range(a.prefix)] + [
            mix((s + 1) << 24 | i) for i in range(a.prefix, a.seq_len)
        ]

    def chained(self, local):
        out, h = [], 0
        for x in local:
            h = mix(h ^ x)
            out.append(h)
        return out

    def events(self):
        """Yield (worker, parent_hash, [(block_hash, tokens_hash), ...])."""
        cache = {}  # small FIFO: replicas are adjacent workers
        for w, seqs in enumerate(self.placement):
            for s in seqs:
                if s not in cache:
                    if len(cache) > 2 * self.a.replicas * max(1, len(seqs)):
                        cache.pop(next(iter(cache)))
                    loc = self.local(s)
                    cache[s] = list(zip(self.chained(loc), loc, strict=False))
                blocks = cache[s]
                for i in range(0, len(blocks), self.a.chunk):
                    parent = blocks[i - 1][0] if i else None
                    yield w, parent, blocks[i : i + self.a.chunk]

    def queries(self, depth, kind, count):
        """`count` block-hash prompts; at most 256 distinct sequences."""
        local = {}
        for i in range(count):
            s = mix(i % 256 + 17) % self.sequences
            if s not in local:
                loc = self.local(s)
                loc += [(7 << 60) + j for j in range(len(loc), depth)]
                local[s] = loc
            if kind == "hit":
                yield local[s][:depth]
            else:
                keep = depth // 2 if kind == "half" else 0
                base = (1 << 61) + i * 4096
                yield local[s][:keep] + [base + j for j in range(keep, depth)]


# ------------------------------------------------------------------ RadixTree
def run_radix(a, wl):
    from dynamo.llm import RadixTree

    clock = time.perf_counter
    rounds = a.rounds if a.blocks * a.workers <= 2_000_000 else 1
    best, mem = None, None
    for rnd in range(rounds):
        tree = RadixTree()
        tree.find_matches([1])  # start its thread
        rss0, times, enc, nblk, nev = rss_bytes(), [], 0.0, 0, 0
        for w, parent, blocks in wl.events():
            t0 = clock()
            payload = json.dumps(
                {
                    "event_id": nev,
                    "data": {
                        "stored": {
                            "parent_hash": parent,
                            "blocks": [{"block_hash": b, "tokens_hash": t} for b, t in blocks],
                        }
                    },
                }
            ).encode()
            t1 = clock()
            tree.apply_event(w, payload)
            t2 = clock()
            enc += t1 - t0
            times.append(t2 - t1)
            nblk += len(blocks)
            nev += 1
        if mem is None:  # first round: clean heap
            mem = rss_bytes() - rss0
        if best is None or sum(times) < best[0]:
            best = (sum(times), enc, lat_us(times))
    store_s, enc, lat = best
    out = {
        "store": {
            "events": nev,
            "blocks": nblk,
            "blocks_per_s": round(nblk / store_s),
            "events_per_s": round(nev / store_s),
            "encode_s": round(enc, 3),
            "apply_s": round(store_s, 3),
            **lat,
        },
        "rss_delta_mb": round(mem / 2**20, 1),
        "bytes_per_block": round(mem / max(1, nblk), 1),
        "lookup": [],
    }
    for depth in a.depths:
        for kind in ("hit", "half", "miss"):
            qs = list(wl.queries(depth, kind, a.queries))
            for q in qs[:20]:
                tree.find_matches(q)
            samples = None
            for _ in range(a.rounds):
                cur, matched, width = [], 0, 0
                for q in qs:
                    t0 = clock()
                    scores = tree.find_matches(q).scores
                    cur.append(clock() - t0)
                    matched += max(scores.values(), default=0)
                    width += len(scores)
                if samples is None or sum(cur) < sum(samples):
                    samples = cur
            out["lookup"].append(
                {
                    "depth": depth,
                    "kind": kind,
                    "lookups_per_s": round(len(qs) / sum(samples)),
                    "mean_best_match": round(matched / len(qs), 1),
                    "mean_workers_scored": round(width / len(qs), 1),
                    **lat_us(samples),
                }
            )
    # removals: evict the tail half of every sequence of a few workers
    times, nrem = [], 0
    for w in range(min(a.workers, 8)):
        for s in wl.placement[w]:
            chain = wl.chained(wl.local(s))[a.seq_len // 2 :][::-1]
            for i in range(0, len(chain), a.chunk):
                payload = json.dumps(
                    {"event_id": nev, "data": {"removed": {"block_hashes": chain[i : i + a.chunk]}}}
                ).encode()
                t0 = clock()
                tree.apply_event(w, payload)
                times.append(clock() - t0)
                nrem += len(chain[i : i + a.chunk])
                nev += 1
    out["remove"] = {"blocks": nrem, "blocks_per_s": round(nrem / sum(times)), **lat_us(times)}
    t0 = clock()
    dump = tree.dump_tree_as_events()
    out["dump"] = {"events": len(dump), "s": round(clock() - t0, 3)}
    return out


# ----------------------------------------------------------- SelectionService
def run_selection(a, wl):
    import msgpack
    import zmq
    from dynamo.llm import SelectionService, compute_block_hash_for_seq

    bs = 4  # tokens per block on the wire

    def tokens(local_list):
        """Four u31 token ids per block, derived from its content hash."""
        flat = []
        for x in local_list:
            y = mix(x)
            flat += [x & 0x7FFFFFFF, (x >> 32) & 0x7FFFFFFF, y & 0x7FFFFFFF, (y >> 32) & 0x7FFFFFFF]
        return flat

    def signed(x):
        """64-bit hashes travel as signed integers."""
        return x - (1 << 64) if x >> 63 else x

    async def go():
        ctx = zmq.Context()
        svc = SelectionService(indexer_threads=a.threads)
        socks = []
        for w in range(a.workers):
            sock = ctx.socket(zmq.PUB)
            sock.setsockopt(zmq.SNDHWM, 0)
            port = sock.bind_to_random_port("tcp://127.0.0.1")
            socks.append(sock)
            await svc.upsert_worker(
                {
                    "worker_id": w + 1,
                    "model_name": "m",
                    "block_size": bs,
                    "endpoint": f"http://127.0.0.1:{port}",
                    "max_num_batched_tokens": 8192,
                    "data_parallel_start_rank": 0,
                    "data_parallel_size": 1,
                    "total_kv_blocks": a.blocks,
                    "kv_events_endpoints": {0: f"tcp://127.0.0.1:{port}"},
                }
            )
        await asyncio.sleep(2.0)  # ZMQ slow joiner
        hashes = {
            s: [signed(h) for h in compute_block_hash_for_seq(tokens(wl.local(s)), bs)] for s in range(wl.sequences)
        }

        def query(s, depth):
            """Pre-hashed request; sequence hashes are only used for booking."""
            return {
                "model_name": "m",
                "block_hashes": hashes[s][:depth],
                "sequence_hashes": hashes[s][:depth],
                "isl_tokens": depth * bs,
            }

        seqno = [0] * a.workers
        nblk, nev, payloads = 0, 0, []
        for w, parent, blocks in wl.events():
            toks = tokens([t for _, t in blocks])
            # signed 64-bit hashes, as the vLLM wire format carries them
            ev = [
                "BlockStored",
                [signed(b) for b, _ in blocks],
                None if parent is None else signed(parent),
                toks,
                bs,
                None,
                "GPU",
            ]
            payloads.append((w, msgpack.packb([time.time(), [ev], 0])))
            nblk += len(blocks)
            nev += 1
        rss0 = rss_bytes()
        start = time.perf_counter()
        for w, p in payloads:
            socks[w].send_multipart([b"", seqno[w].to_bytes(8, "big"), p])
            seqno[w] += 1
        sent = time.perf_counter() - start
        # wait until the last sequence of every worker is visible
        deadline = time.perf_counter() + a.ingest_timeout
        pending = set(range(a.workers))
        while pending and time.perf_counter() < deadline:
            for w in list(pending):
                res = await svc.overlap_scores(query(wl.placement[w][-1], a.seq_len))
                got = max((x["device_blocks"] for x in res["workers"] if x["worker_id"] == w + 1), default=0)
                if got >= a.seq_len:
                    pending.discard(w)
            if pending:
                await asyncio.sleep(0.01)
        ingest = time.perf_counter() - start
        rss1 = rss_bytes()
        out = {
            "store": {
                "events": nev,
                "blocks": nblk,
                "send_s": round(sent, 3),
                "ingest_s": round(ingest, 3),
                "complete": not pending,
                "blocks_per_s": round(nblk / ingest),
            },
            "rss_delta_mb": round((rss1 - rss0) / 2**20, 1),
            "bytes_per_block": round((rss1 - rss0) / max(1, nblk), 1),
            "lookup": [],
        }
        for depth in a.depths:
            depth = min(depth, a.seq_len)
            reqs = [query(mix(i % 256 + 17) % wl.sequences, depth) for i in range(a.queries)]
            for r in reqs[:10]:
                await svc.overlap_scores(r)
            samples = None
            for _ in range(a.rounds):
                cur = []
                for r in reqs:
                    t0 = time.perf_counter()
                    await svc.overlap_scores(r)
                    cur.append(time.perf_counter() - t0)
                if samples is None or sum(cur) < sum(samples):
                    samples = cur
            out["lookup"].append(
                {"depth": depth, "kind": "hit", "lookups_per_s": round(len(samples) / sum(samples)), **lat_us(samples)}
            )
        svc.shutdown()
        for s in socks:
            s.close(0)
        ctx.term()
        return out

    return asyncio.run(go())


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--api", choices=("radix", "selection"), default="radix")
    ap.add_argument("--workers", type=int, default=64)
    ap.add_argument("--blocks", type=int, default=10_000, help="per worker")
    ap.add_argument("--seq-len", type=int, default=2048)
    ap.add_argument("--groups", type=int, default=8)
    ap.add_argument("--prefix", type=int, default=32)
    ap.add_argument("--replicas", type=int, default=4)
    ap.add_argument("--chunk", type=int, default=64, help="blocks per event")
    ap.add_argument("--queries", type=int, default=1000)
    ap.add_argument("--depths", type=int, nargs="+", default=[128, 512, 2048])
    ap.add_argument("--rounds", type=int, default=3, help="best-of-N for lookups (and stores up to 2M blocks)")
    ap.add_argument("--threads", type=int, default=4)
    ap.add_argument("--ingest-timeout", type=float, default=120)
    a = ap.parse_args()
    from importlib.metadata import version

    wl = Workload(a)
    t0 = time.perf_counter()
    res = (run_radix if a.api == "radix" else run_selection)(a, wl)
    print(
        json.dumps(
            {
                "peer": "dynamo-index",
                "api": {"radix": "dynamo.llm.RadixTree", "selection": "dynamo.llm.SelectionService"}[a.api],
                "versions": {"ai-dynamo-runtime": version("ai-dynamo-runtime")},
                "config": {k: v for k, v in vars(a).items() if k != "api"},
                "sequences": wl.sequences,
                **res,
                "total_s": round(time.perf_counter() - t0, 2),
                "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
