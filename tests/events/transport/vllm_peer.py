"""The other side of the interoperation tests, run with an interpreter that has vLLM. Uses it as a library; copies nothing.

    vllm_peer.py publish ENDPOINT REPLAY   reads JSON lists of events from standard input, one batch a line, and has
                                           vLLM's own publisher send each
    vllm_peer.py read ENDPOINT REPLAY      decodes batches with vLLM's types until one clears everything; what it missed
                                           it asks for; prints one JSON line per batch

It says ``ready`` once vLLM is imported and its sockets are open.
"""

import json
import sys

import msgspec
import zmq


def publish(endpoint: str, replay: str) -> None:
    from vllm.distributed import kv_events

    publisher = kv_events.ZmqEventPublisher(
        0, endpoint=endpoint, replay_endpoint=None if replay == "none" else replay, topic="kv@vllm", buffer_steps=50
    )
    print("ready", flush=True)
    for line in sys.stdin:
        events = [getattr(kv_events, event.pop("type"))(**event) for event in json.loads(line)]
        publisher.publish(kv_events.KVEventBatch(ts=1.5, events=events))
        print("sent", flush=True)
    publisher.shutdown()


def read(endpoint: str, replay: str) -> None:
    from vllm.distributed.kv_events import KVEventBatch

    decode = msgspec.msgpack.Decoder(KVEventBatch).decode
    context = zmq.Context.instance()
    sub = context.socket(zmq.SUB)
    sub.setsockopt(zmq.SUBSCRIBE, b"")
    sub.connect(endpoint)
    print("ready", flush=True)
    expected = 0

    def show(seq: int, payload: bytes) -> None:
        batch = decode(payload)
        events = [{"type": type(event).__name__, **msgspec.to_builtins(event)} for event in batch.events]
        print(json.dumps({"seq": seq, "rank": batch.data_parallel_rank, "events": events}), flush=True)
        if any(event["type"] == "AllBlocksCleared" for event in events):
            sys.exit()

    while True:
        _, sequence, payload = sub.recv_multipart()
        seq = int.from_bytes(sequence, "big")
        if seq > expected:
            dealer = context.socket(zmq.DEALER)
            dealer.connect(replay)
            dealer.send_multipart([b"", expected.to_bytes(8, "big")])
            while True:
                _, _, sequence, missed = dealer.recv_multipart()
                at = int.from_bytes(sequence, "big", signed=True)
                if at == -1:
                    break
                if expected <= at < seq:
                    show(at, missed)
                    expected = at + 1
            dealer.close(linger=0)
        if seq >= expected:
            show(seq, payload)
            expected = seq + 1


if __name__ == "__main__":
    if sys.argv[1] == "publish":
        publish(*sys.argv[2:4])
    else:
        read(*sys.argv[2:4])
