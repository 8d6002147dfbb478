"""Ranks in which tests run their tasks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainatomy.measurement.process.job import Task
from trainatomy.measurement.process.pool import Answer, Processes


class Ranks:
    """Runs every task in as many ranks, all forked from one server that has imported the libraries."""

    def __init__(self, processes: Processes, count: int) -> None:
        self.processes = processes
        self.count = count

    def run(self, task: Task, *rest: Any) -> tuple[Answer, ...]:
        """Run a task."""
        return self.processes.run(replace(task, ranks=self.count, loop="trainer"), *rest)
