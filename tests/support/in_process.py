"""A runner of batch jobs that stays in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from recserve.batch.part import Step, Task, write_part
from recserve.batch.source import Partition


@dataclass(frozen=True)
class InProcess:
    """Computes partitions one after another in this process.

    Attributes:
        task: Computes the rows.
    """

    task: Task

    @property
    def suffix(self) -> str:
        """Suffix of the output files."""
        return self.task.suffix

    @property
    def facts(self) -> Mapping[str, object]:
        """What determines the output besides the input."""
        return self.task.facts

    def open(self, lock: int) -> Mapping[str, object]:
        """Returns the same as `facts`: the models are open already."""
        return self.task.facts

    def run(self, partitions: Sequence[Partition], folder: Path) -> Iterator[Step]:
        """Computes partitions in order."""
        for partition in partitions:
            yield from write_part(self.task, partition, folder)

    def close(self) -> None:
        """Does nothing: the task belongs to the caller."""
