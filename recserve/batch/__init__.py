"""Offline jobs over whole files: slates, completions and scores, resumable and repeatable.

from pathlib import Path
from recserve.batch import Job, LocalWorkers, SlateRecipe, run

recipe = SlateRecipe("shop.bundle")
report = run(Job(Path("users.parquet"), Path("slates")), LocalWorkers(recipe, num_workers=2))
"""

from recserve.batch.arrow import slates
from recserve.batch.generate import Defaults, Generator
from recserve.batch.job import (
    Job,
    PartRunner,
    Progress,
    Report,
    TooManyErrors,
    check,
    run,
)
from recserve.batch.manifest import OutputExists
from recserve.batch.part import Generated, JobPart, Task
from recserve.batch.processes import LocalWorkers, WorkerFailed
from recserve.batch.recipe import SlateRecipe, TextRecipe, WrongOption

__all__ = [
    "Defaults",
    "Generated",
    "Generator",
    "Job",
    "JobPart",
    "LocalWorkers",
    "OutputExists",
    "PartRunner",
    "Progress",
    "Report",
    "SlateRecipe",
    "Task",
    "TextRecipe",
    "TooManyErrors",
    "WorkerFailed",
    "WrongOption",
    "check",
    "run",
    "slates",
]
