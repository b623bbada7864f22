"""A page of metrics in Prometheus's text format: sums of samples, and labels."""

import math
import re

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class MetricsPage:
    """One page. Samples that aren't finite numbers are left out: NaN means "not yet"."""

    def __init__(self, text: str) -> None:
        self._samples: dict[str, list[tuple[str, float]]] = {}
        """By metric: the labels, as they are written, and the value of each sample."""
        for name, labels, value in _SAMPLE.findall(text):
            samples = self._samples.setdefault(name, [])
            try:
                number = float(value)
            except ValueError:
                continue
            if math.isfinite(number):
                samples.append((labels, number))

    def __contains__(self, name: str) -> bool:
        return name in self._samples

    def total(self, *names: str) -> float:
        """Return the sum of all samples of these metrics, 0 if there is none."""
        return sum(value for name in names for _, value in self._samples.get(name, ()))

    def labels(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Return the labels and the value of each sample of a metric."""
        return [(dict(_LABEL.findall(labels)), value) for labels, value in self._samples.get(name, ())]

    def label_values(self, label: str, prefix: str) -> set[str]:
        """Return the values that ``label`` has among metrics whose names begin with ``prefix``."""
        wanted = re.compile(rf'(?:^|,){label}="([^"]*)"')
        texts = (labels for name, samples in self._samples.items() if name.startswith(prefix) for labels, _ in samples)
        return {matched[1] for labels in texts if (matched := wanted.search(labels))}
