"""Tiers: the places where copies of blocks live, closest to the compute first. Another tier is another entry here.

Everything that depends on a single tier is in its entry: its names in settings, events and reports, its default link, its
credit and its price. Code elsewhere goes through ``Tier`` or ``LOWER_TIERS``.
"""

from enum import IntEnum

import msgspec


class TierEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Names and defaults of one tier."""

    label: str
    """Name in settings, reports and answers. The settings of a lower tier begin with it: ``host_blocks``."""
    place: str
    """The label in a sentence."""
    medium: str
    """Its name in the events that we write: vLLM's, if vLLM has one."""
    media: tuple[str, ...]
    """Names in the events of engines, in lower case with underscores, ``medium`` among them."""
    service_name: str
    """Its name in the index service: Dynamo's, if Dynamo has one."""
    metric_source: str
    """Its value of the label ``source`` in vLLM's ``prompt_tokens_cached_by_source``."""
    credit: float
    """Worth of a cached block to the router and the index, where computing it is 1: Dynamo's credits."""
    color: str
    """In charts."""
    stores: str = ""
    """Name in a report of the copies that arrive from the next closer tier ..."""
    loads: str = ""
    """... and of those that go back there."""
    scope: str = "private"
    """``private`` to a worker or ``shared`` by all, unless a setting says otherwise."""
    gb_s: int = 0
    """Default bandwidth of a worker's link to it, each way."""
    latency_ns: int = 0
    """Default latency of that link."""
    price: float = 0.0
    """Default price of a GiB per hour, in US dollars."""


TIERS = (
    TierEntry(
        label="device",
        place="device memory",
        medium="GPU",
        media=("gpu", "g1", "device", "hbm", "cuda", "vram", "npu", "xpu", "tpu"),
        service_name="gpu",
        metric_source="device",
        credit=1.0,
        color="blue",
    ),
    TierEntry(
        label="host",
        place="host memory",
        medium="CPU",
        media=("cpu", "g2", "host", "dram", "ram", "cpu_pinned", "host_pinned", "pinned", "cpu_tier1"),
        service_name="cpu",
        metric_source="host",
        credit=0.75,
        color="aqua",
        stores="stores",
        loads="loads",
        gb_s=32,  # about the speed of PCIe 5 to pageable memory, and the Dynamo mocker's
        price=0.004,  # about what clouds ask for memory beyond a machine's own: a round number
    ),
    TierEntry(
        label="storage",
        place="storage",
        medium="STORAGE",
        media=(
            *("storage", "g3", "disk", "fs", "file", "nvme", "ssd", "external"),
            *("shared_storage", "cpu_tier2"),
        ),
        service_name="disk",
        metric_source="disk",
        credit=0.25,
        color="violet",
        stores="spills",
        loads="fetches",
        gb_s=10,
        latency_ns=100_000,
        price=0.0001,  # 0.08 a month
    ),
    TierEntry(
        label="remote",
        place="remote storage",
        medium="REMOTE",
        media=("remote", "g4"),
        service_name="remote",
        metric_source="external_unspecified",
        credit=0.25,
        color="orange",
        stores="remote_spills",
        loads="remote_fetches",
        gb_s=2,
        latency_ns=5_000_000,
        price=0.00003,  # 0.023 a month
    ),
    TierEntry(
        label="object",
        place="object storage",
        medium="OBJ",
        media=("obj", "object", "object_store", "g5"),  # vLLM's and NIXL's word, and llm-d's
        service_name="object",
        metric_source="external_unspecified",
        credit=0.25,
        color="green",
        stores="object_spills",
        loads="object_fetches",
        scope="shared",
        gb_s=1,  # a dozen connections to S3, by what AWS says of one
        latency_ns=30_000_000,  # AWS: a median of tens of milliseconds for small requests
        price=0.00003,  # 0.023 a month
    ),
)
"""Closest to the compute first."""


class Tier(IntEnum):
    """Tier of a copy. Lower is closer to the compute."""

    G1 = 1
    """Device memory."""
    G2 = 2
    """Host memory of one worker, or shared by a few."""
    G3 = 3
    """Storage of one worker, or shared by the fleet."""
    G4 = 4
    """Remote storage: another machine's memory or disks, over the network."""
    G5 = 5
    """An object store. (Dynamo's block manager, which knows no remote tier before it, calls this G4.)"""

    @property
    def entry(self) -> TierEntry:
        """Its names and defaults."""
        return TIERS[self - 1]

    @property
    def label(self) -> str:
        """Name in settings, reports and answers."""
        return TIERS[self - 1].label

    @property
    def place(self) -> str:
        """The label in a sentence."""
        return TIERS[self - 1].place


LOWER_TIERS = tuple(Tier)[1:]
"""Tiers that can stand below a device, closest first."""
ALWAYS_REPORTED = 3
"""Lower tiers that a report names even if no worker has them."""


def reported_tiers(depth: int) -> tuple[Tier, ...]:
    """Lower tiers that a report of workers with ``depth`` of them names, closest first."""
    return LOWER_TIERS[: max(ALWAYS_REPORTED, depth)]
