"""Many replays at a time: what one of them is, and who runs them: this process, several of them, or a Ray cluster."""

from kvyard.replay.jobs.executor import Ended, Executor, Told
from kvyard.replay.jobs.local import LocalExecutor
from kvyard.replay.jobs.task import Task, TracePart, perform

__all__ = ["Ended", "Executor", "LocalExecutor", "Task", "Told", "TracePart", "perform"]
