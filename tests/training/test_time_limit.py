"""`max_minutes` bounds all that a training command does, on a clock that counts its work."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from recserve.bundle.bundle import Bundle
from recserve.evaluation.slates import Slates
from recserve.training import time_limit
from recserve.training.item_drafters.draft_head import DrafterRecipe, train_drafter
from recserve.training.loop import _Run
from recserve.training.options import TrainOptions
from recserve.training.recommender import fit_history_bonus
from recserve.training.recommender.recommender import ITEMS_MASKED, train_recommender
from recserve.training.recommender.retriever import RetrieverRecipe, train_retriever
from recserve.training.schedule import Schedule
from tests.support.tiny_bundle import shared_bundle

SMALL = replace(
    ITEMS_MASKED,
    hidden_size=32,
    num_heads=2,
    num_layers=1,
    intermediate_size=32,
    schedule=Schedule(3, 1e-3),
)
LOAD_S, STEP_S, VALIDATION_S, SLATES_S = 5.0, 0.5, 1.5, 3.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that stands still but for loading, steps, validations and slates."""
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(time_limit, "time", clock)

    def timed(owner: object, name: str, seconds: float) -> None:
        original: Callable[..., object] = getattr(owner, name)

        def call(*args: object, **kwargs: object) -> object:
            clock.now += seconds
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    timed(Bundle, "events", LOAD_S)
    timed(_Run, "_step", STEP_S)
    timed(_Run, "_validate", VALIDATION_S)
    timed(Slates, "answers", SLATES_S)
    timed(fit_history_bonus, "dense_log_p", SLATES_S)
    return clock


@pytest.mark.parametrize("minutes", [0.25, 1.2, 30, None])
@pytest.mark.parametrize("kind", ["recommender", "speculative", "retriever"])
def test_a_command_ends_within_its_minutes(
    kind: str, minutes: float | None, clock: SimpleNamespace, tmp_path: Path
) -> None:
    """A quarter of a minute cuts what follows the training short, and the command says so."""
    bundle = Bundle.open(Path(shutil.copytree(shared_bundle(), tmp_path / "bundle")))
    began, text = clock.now, io.StringIO()
    options = TrainOptions(device="cpu", precision="float32", max_minutes=minutes).start()
    console = Console(file=text, width=200)
    schedule = Schedule(3, 1e-3)
    if kind == "recommender":
        train_recommender(bundle, options, SMALL, console)
    elif kind == "retriever":
        train_retriever(bundle, options, RetrieverRecipe(schedule=schedule), console)
    else:
        recipe = DrafterRecipe(2048, 20, 10, schedule=schedule)
        train_drafter(bundle, options, recipe, console)
    spent = clock.now - began
    assert minutes is None or spent <= 60 * minutes + max(STEP_S + VALIDATION_S, LOAD_S + SLATES_S)
    opened = Bundle.open(bundle.root)
    opened.verify()
    cut = "max_minutes left" in text.getvalue()
    assert minutes == 1.2 or cut == (minutes == 0.25)
    if kind == "recommender":
        assert cut == ("auto" not in opened.manifest.recommender)
