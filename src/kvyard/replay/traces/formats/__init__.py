"""The formats kvyard reads, one a file. Importing this package registers them; the last is tried first."""

from kvyard.replay.traces.formats import plain, azure, burstgpt, sharegpt, mooncake, bailian, weka, dynamo  # isort: skip

__all__ = ["azure", "bailian", "burstgpt", "dynamo", "mooncake", "plain", "sharegpt", "weka"]
