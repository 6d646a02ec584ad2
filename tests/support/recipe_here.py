"""Runs a batch recipe in the test's own process, for bytes that workers must write too."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

from recserve.batch.recipe import KERNELS, Recipe, environment
from recserve.kernels import backend
from tests.support.in_process import InProcess


@dataclass(frozen=True)
class RecipeHere(InProcess):
    """Computes a recipe here, and records what a job with workers records."""

    recipe: Recipe

    @property
    def facts(self) -> Mapping[str, object]:
        """What is known before the models are open, as of workers."""
        return self.recipe.facts()


@contextmanager
def here(recipe: Recipe) -> Iterator[RecipeHere]:
    """Opens the models of a recipe in this process, with the kernels that workers take."""
    kernels = environment(recipe)[KERNELS]
    with mock.patch.object(backend, "FORCED", kernels), recipe.open() as task:
        yield RecipeHere(task, recipe)
