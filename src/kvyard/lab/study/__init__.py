"""Common parts of studies: many replays of one trace, their metrics side by side, and advice on the choice.

A study is a definition: a function that makes a ``Study`` with a view, gives it axes to ``vary`` (or points to ``replay``), and
returns it. The view makes a ``Result`` of the reports: a ``Table`` of rows with metrics, charts, and sentences of ``advice``.
The rest is here: running on processes or a cluster, keeping reports and going on after an interrupt, printing, CSV, JSON and
the page. Metrics come from ``kvyard.replay.report.metrics``.
"""

from kvyard.lab.study.grid import Grid, Point, make_grid, parse_vary
from kvyard.lab.study.result import Chart, Result, Section
from kvyard.lab.study.study import Study, own_options
from kvyard.lab.study.table import Row, Table, columns

__all__ = [
    "Chart",
    "Grid",
    "Point",
    "Result",
    "Row",
    "Section",
    "Study",
    "Table",
    "columns",
    "make_grid",
    "own_options",
    "parse_vary",
]
