from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

from recserve.kernels.native.processor import Processor
from recserve.training import loop, time_limit
from recserve.training import options as options_module
from recserve.training.loop import StepLoss, fit
from recserve.training.optimizers import build_optimizers
from recserve.training.options import TrainOptions, TrainReport
from recserve.training.schedule import Schedule

OPTIONS = TrainOptions(device="cpu", precision="float32")
SCHEDULE = Schedule(epochs=4, learning_rate=0.05, averaging=0.5)


class Interrupted(Exception):
    pass


class Line:
    """Fits y = x @ w with dropout; breaks in epoch `fails`, validates to `script` if given."""

    selection = "score"

    def __init__(
        self, fails: int | None = None, script: list[float] | None = None, fails_at: int = 0
    ) -> None:
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.fails, self.script, self.epoch = fails, script, -1
        self.fails_at, self.batch = fails_at, -1
        noise = torch.Generator().manual_seed(1)
        self.x = torch.randn(32, 4, generator=noise)
        self.y = self.x.sum(1, keepdim=True)

    def plan(self, epoch: int) -> list[torch.Tensor]:
        self.epoch, self.batch = epoch, -1
        order = torch.randperm(32, generator=torch.Generator().manual_seed(epoch))
        return list(order.split(8))

    def loss(self, batch: torch.Tensor) -> StepLoss:
        self.batch += 1
        if self.epoch == self.fails and self.batch >= self.fails_at:
            raise Interrupted
        loss = F.mse_loss(self.model(self.x[batch]), self.y[batch])
        return StepLoss(loss, {"error": loss.detach()}, len(batch))

    def validate(self) -> dict[str, float]:
        if self.script is not None:
            return {"score": self.script[self.epoch]}
        return {"score": -F.mse_loss(self.model(self.x), self.y).item()}


def quiet() -> Console:
    return Console(quiet=True)


def outcome(report: TrainReport) -> list[tuple[dict[str, float], dict[str, float]]]:
    return [(record.losses, record.metrics) for record in report.history]


@pytest.mark.parametrize("orthogonal", [(), ("0.",), ("",)], ids=["adamw", "both", "muon"])
def test_resumed_run_equals_the_straight_one(orthogonal: tuple[str, ...], tmp_path: Path) -> None:
    """Broken in epoch 3 of 4 and resumed: the same losses, metrics and weights, bit for bit."""
    schedule = replace(SCHEDULE, orthogonal=orthogonal)
    straight = Line()
    report = fit(straight, schedule, OPTIONS, tmp_path / "straight", quiet())
    with pytest.raises(Interrupted):
        fit(Line(fails=2), schedule, OPTIONS, tmp_path / "broken", quiet())
    resumed = Line()
    options = replace(OPTIONS, resume=True)
    second = fit(resumed, schedule, options, tmp_path / "broken", quiet())
    assert report.epochs == second.epochs == 4
    assert outcome(second) == outcome(report)
    for one, two in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(two, one, rtol=0, atol=0)


@pytest.mark.parametrize("fails", [0, 1, 3])
@pytest.mark.parametrize("fails_at", [0, 1, 3])
def test_a_run_resumes_within_an_epoch(
    fails: int, fails_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken before any batch and resumed there: the same losses, metrics and weights."""
    monkeypatch.setattr(loop, "SAVE_EVERY_S", -1)
    straight, trained = Line(), []
    report = fit(straight, SCHEDULE, OPTIONS, tmp_path / "straight", quiet())

    class Counted(Line):
        def loss(self, batch: torch.Tensor) -> StepLoss:
            trained.append(batch)
            return super().loss(batch)

    with pytest.raises(Interrupted):
        fit(Line(fails, None, fails_at), SCHEDULE, OPTIONS, tmp_path / "broken", quiet())
    resumed = Counted()
    options = replace(OPTIONS, resume=True)
    second = fit(resumed, SCHEDULE, options, tmp_path / "broken", quiet())
    assert len(trained) == 16 - 4 * fails - fails_at
    assert outcome(second) == outcome(report)
    for one, two in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(two, one, rtol=0, atol=0)


def test_best_epoch_is_kept_and_all_are_trained(tmp_path: Path) -> None:
    trainee = Line(script=[0.1, 0.3, 0.2, 0.2, 0.1])
    report = fit(trainee, replace(SCHEDULE, epochs=5), OPTIONS, tmp_path, quiet())
    assert (report.stopped, report.best_epoch, report.epochs) == ("epochs", 2, 5)
    assert report.metrics == {"score": 0.3}


def test_averaged_weights_are_kept(tmp_path: Path) -> None:
    """With an average that never moves from the first step on, the kept weights are old ones."""
    plain, averaged = Line(), Line()
    fit(plain, replace(SCHEDULE, averaging=0.0), OPTIONS, tmp_path / "a", quiet())
    fit(averaged, replace(SCHEDULE, averaging=0.99), OPTIONS, tmp_path / "b", quiet())
    pairs = zip(plain.model.parameters(), averaged.model.parameters(), strict=True)
    assert any(not torch.allclose(one, two) for one, two in pairs)


def test_max_minutes_ends_the_run(tmp_path: Path) -> None:
    options = replace(OPTIONS, max_minutes=0.01)
    report = fit(Line(), replace(SCHEDULE, epochs=10_000), options, tmp_path, quiet())
    assert report.stopped == "max_minutes"
    assert report.epochs < 10_000


def test_minutes_are_those_of_this_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch takes a second, validation nothing: a minute, and another one where it resumes."""
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(time_limit, "time", clock)
    schedule = replace(SCHEDULE, epochs=10_000)

    class Timed(Line):
        def loss(self, batch: torch.Tensor) -> StepLoss:
            clock.now += 1
            return super().loss(batch)

        def validate(self) -> dict[str, float]:
            clock.now += 1e-6
            return super().validate()

    options = replace(OPTIONS, max_minutes=1.0)
    first = fit(Timed(), schedule, options, tmp_path, quiet())
    assert first.stopped == "max_minutes" and first.seconds == pytest.approx(60, abs=1)
    clock.now += 1000  # nobody trains meanwhile
    second = fit(Timed(), schedule, replace(options, resume=True), tmp_path, quiet())
    assert second.stopped == "max_minutes" and second.seconds == pytest.approx(120, abs=2)
    assert second.epochs == pytest.approx(120 / 4, abs=1)


@pytest.mark.parametrize(("name", "batches"), [("processor", 60), ("wall", 6)])
def test_minutes_of_the_processor(name, batches, tmp_path, monkeypatch) -> None:
    """A batch takes 10 seconds, of which the process computes one."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: 10 * clock.now)
    clock.process_time = lambda: clock.now
    monkeypatch.setattr(time_limit, "time", clock)

    class Timed(Line):
        def loss(self, batch: torch.Tensor) -> StepLoss:
            clock.now += 1
            return super().loss(batch)

        def validate(self) -> dict[str, float]:
            clock.now += 1e-6
            return super().validate()

    options = replace(OPTIONS, max_minutes=1.0, clock=name)
    fit(Timed(), replace(SCHEDULE, epochs=10_000), options, tmp_path, quiet())
    assert clock.now == pytest.approx(batches, abs=6)


def test_resume_refuses_another_recipe_and_a_damaged_file(tmp_path: Path) -> None:
    fit(Line(), SCHEDULE, OPTIONS, tmp_path, quiet())
    options = replace(OPTIONS, resume=True)
    with pytest.raises(ValueError, match=r"other values of \['learning_rate'\]"):
        fit(Line(), replace(SCHEDULE, learning_rate=0.1), options, tmp_path, quiet())
    path = tmp_path / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"checkpoint\.safetensors is damaged"):
        fit(Line(), SCHEDULE, options, tmp_path, quiet())


@pytest.mark.parametrize(
    "name, avx512, amx, expected",
    [
        ("AMD EPYC 9654", True, False, torch.bfloat16),
        ("AMD EPYC 7763", False, False, None),
        ("Intel(R) Xeon(R) Processor", True, False, None),
        ("Intel(R) Xeon(R) Processor", True, True, torch.bfloat16),
        ("Neoverse-N1", False, False, None),
    ],
)
def test_precision_is_the_faster_one(
    name: str,
    avx512: bool,
    amx: bool,
    expected: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(options_module, "processor", lambda: Processor(name, frozenset()))
    assert TrainOptions(device="cpu").autocast_dtype() == expected


def test_matrices_that_are_named_are_moved_orthogonally() -> None:
    """Muon has the trunk's matrices, AdamW all else; a step of Muon has nearly equal singular
    values, and the root mean square of AdamW's steps (arXiv 2502.16982, section 2.2)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 24), nn.LayerNorm(24), nn.Linear(24, 8))
    schedule = Schedule(1, 0.1, weight_decay=0.0, rates=(("2.", 0.5),), orthogonal=("0.", "1."))
    adam, muon = build_optimizers(model, schedule)
    assert [p.shape for g in muon.param_groups for p in g["params"]] == [(24, 40)]
    shares = {(g["rate"], g["params"][0].ndim < 2): len(g["params"]) for g in adam.param_groups}
    assert shares == {(1.0, True): 3, (0.5, False): 1, (0.5, True): 1}
    before = model[0].weight.detach().clone()
    model(torch.randn(64, 40)).square().sum().backward()
    muon.step()
    step = model[0].weight.detach() - before
    sizes = torch.linalg.svdvals(step)
    assert sizes.max() < 2 * sizes.median()
    assert step.square().mean().sqrt().item() == pytest.approx(0.2 * 0.1, rel=0.2)
    assert len(build_optimizers(model, replace(schedule, orthogonal=()))) == 1


def test_learning_rate_rises_then_falls_to_the_floor() -> None:
    schedule = Schedule(10, 1.0, warmup=0.1, floor=0.02)
    assert schedule.factor(0.05) == pytest.approx(0.5)
    assert schedule.factor(0.5) == pytest.approx(0.51)
    assert schedule.factor(1.0) == schedule.factor(3.0) == pytest.approx(0.02)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"epochs": 0}, "epochs is 0; train for at least 1"),
        ({"max_minutes": 0.0}, "max_minutes is 0.0; it must be above 0"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"precision": "int8"}, "precision is 'int8'"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_options_refuse(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainOptions(**values)  # type: ignore[arg-type]


def spoken() -> Console:
    return Console(file=io.StringIO(), width=200)


def said(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("fails", "words"),
    [(0, "nothing is saved"), (2, "interrupted after epoch 2; the same command with --resume")],
)
def test_ctrl_c_says_how_to_go_on(
    fails: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "Interrupted", KeyboardInterrupt)
    console = spoken()
    with pytest.raises(KeyboardInterrupt):
        fit(Line(fails), SCHEDULE, OPTIONS, tmp_path, console)
    assert words in said(console)


def test_a_resume_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    console = spoken()
    fit(Line(), SCHEDULE, replace(OPTIONS, resume=True), tmp_path, console)
    assert "no checkpoint.safetensors to resume; training starts anew" in said(console)


@pytest.mark.parametrize("fails", [0, 1])
def test_a_run_that_fails_leaves_no_empty_folder(tmp_path, fails):
    """After an epoch there is a checkpoint, and the folder stays."""
    folder = tmp_path / "model"
    with pytest.raises(Interrupted):
        fit(Line(fails=fails), SCHEDULE, OPTIONS, folder, Console(file=io.StringIO()))
    assert folder.exists() == (fails > 0)
    assert not folder.exists() or any(folder.iterdir())
    given = tmp_path / "given"
    given.mkdir()
    with pytest.raises(Interrupted):
        fit(Line(fails=0), SCHEDULE, OPTIONS, given, Console(file=io.StringIO()))
    assert given.exists()
