"""Many replays at a time: one replay as a task, and its executors: this process, several processes, or a Ray cluster."""

from kvyard.lab.jobs.executor import Ended, Executor, Progress
from kvyard.lab.jobs.local import LocalExecutor
from kvyard.lab.jobs.task import Task, TracePart, perform

__all__ = ["Ended", "Executor", "LocalExecutor", "Progress", "Task", "TracePart", "perform"]
