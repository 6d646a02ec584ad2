"""The training loop that all models share: schedule, validation and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from recserve.training.checkpoint import RunState, load_checkpoint, save_checkpoint
from recserve.training.optimizers import build_optimizers
from recserve.training.options import EpochRecord, TrainOptions, TrainReport
from recserve.training.plot import save_plot
from recserve.training.schedule import Schedule

LOG_EVERY_S = 10.0  # lines of progress within an epoch, where no bar can be drawn
ESTIMATE_AFTER_S = 5.0  # of the first epoch
SAVE_EVERY_S = 600.0  # checkpoints within an epoch
VALIDATION_SHARE = 0.1  # share of max_minutes that is reserved for the first validation


Batch = TypeVar("Batch")


@dataclass(frozen=True)
class StepLoss:
    """Loss of one batch.

    Attributes:
        total: Scalar that the optimisers minimise.
        parts: Means per target by name, for the log.
        targets: Number of targets in the batch.
    """

    total: Tensor
    parts: dict[str, Tensor]
    targets: int


class Trainee(Protocol[Batch]):
    """A model with its data and its validation, as the loop uses them.

    `Batch` is a cheap description of a batch, for example the row numbers of its users.

    Attributes:
        selection: Name of the metric of `validate` that selects a checkpoint; higher is better.
    """

    selection: str

    @property
    def model(self) -> nn.Module:
        """The model whose parameters are trained."""
        ...

    def plan(self, epoch: int) -> Sequence[Batch]:
        """Returns a description of each batch of an epoch; it depends only on (seed, epoch)."""
        ...

    def loss(self, batch: Batch) -> StepLoss:
        """Returns the loss of the described batch."""
        ...

    def validate(self) -> dict[str, float]:
        """Returns metrics of the current weights; called in eval mode, without gradients."""
        ...


def fit(
    trainee: Trainee[Batch],
    schedule: Schedule,
    options: TrainOptions,
    directory: Path,
    console: Console | None = None,
    reserve: float = 0.0,
) -> TrainReport:
    """Trains a model and leaves it with the weights that validated best.

    The learning rate follows the finished share of the run. This share is the larger of two: steps
    of all steps, and seconds of those that `max_minutes` leaves. The time of earlier, resumed runs
    does not count. A run that was interrupted and resumed equals an uninterrupted one, unless
    `max_minutes` ends it.

    Args:
        trainee: Model, data and validation.
        schedule: Learning rate, averaging and stopping.
        options: Options of the command, for example seed and time limit.
        directory: Receives `checkpoint.safetensors` after each epoch, and every SAVE_EVERY_S within
            one, and `training.png` at the end.
        console: Where progress is printed; None means standard error.
        reserve: Share of the time left that the caller needs after the training.

    Returns:
        The report of the run.

    Raises:
        ValueError: If the checkpoint to resume was written with another recipe.
    """
    options = options.part(1 - reserve)
    run = _Run(trainee, schedule, options, directory, console or Console(stderr=True))
    return run.run()


class _Run(Generic[Batch]):
    """One call of `fit`: the state of the run and the steps on it."""

    def __init__(
        self,
        trainee: Trainee[Batch],
        schedule: Schedule,
        options: TrainOptions,
        directory: Path,
        console: Console,
    ) -> None:
        self.trainee, self.schedule, self.options = trainee, schedule, options
        self.directory, self.console = directory, console
        self.checkpoint = directory / "checkpoint.safetensors"
        model = trainee.model
        self.named = dict(model.named_parameters())
        self.state = RunState(
            model,
            build_optimizers(model, schedule),
            {name: p.detach().clone() for name, p in self.named.items()},
            {},
        )
        self.recipe = asdict(schedule) | {"seed": options.seed, "model": type(model).__name__}
        if options.half_life_days is not None:
            self.recipe["half_life_days"] = options.half_life_days
        self.limit = options.limit
        self.limit_s = self.limit.left_s
        self.dtype = options.autocast_dtype()
        self.device = options.torch_device()
        self._estimates = True  # until the length of the run has been estimated

    def run(self) -> TrainReport:
        """Trains until the epochs or the time run out, then restores the best weights."""
        state = self.state
        if self.options.resume and self.checkpoint.exists():
            load_checkpoint(state, self.checkpoint, self.recipe)
            self.console.print(f"resumed {self._place()} of {self.schedule.epochs}")
        elif self.options.resume:
            self.console.print(f"no {self.checkpoint.name} to resume; training starts anew")
        is_new = not self.directory.exists()
        self.directory.mkdir(parents=True, exist_ok=True)  # fail now, not after an epoch
        self.began, self.earlier_s = self.limit.now(), state.seconds
        try:
            stopped = self._epochs()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                self.console.print(self._how_to_resume(), soft_wrap=True)
            if is_new and not any(self.directory.iterdir()):
                self.directory.rmdir()
            raise
        with torch.no_grad():
            for name, parameter in self.named.items():
                parameter.copy_(state.best[name])
        self.trainee.model.eval()
        save_plot(state.history, self.trainee.selection, self.directory / "training.png")
        best = state.history[state.best_epoch - 1]
        return TrainReport(
            state.epoch,
            state.best_epoch,
            self.trainee.selection,
            best.metrics,
            stopped,  # type: ignore[arg-type]
            state.seconds,
            self.directory,
            state.history,
        )

    def _how_to_resume(self) -> str:
        """Returns what is left of an interrupted run."""
        if not self.state.epoch and not self.state.batches:
            return "interrupted in the first epoch; nothing is saved"
        return f"interrupted {self._place()}; the same command with --resume continues there"

    def _place(self) -> str:
        """Returns the place of the last checkpoint."""
        epoch, batches = self.state.epoch, self.state.batches
        return (
            f"after {batches} batches of epoch {epoch + 1}" if batches else f"after epoch {epoch}"
        )

    def _epochs(self) -> str:
        """Trains epoch by epoch. Returns why it ended."""
        state, stopped = self.state, "epochs"
        with progress_bar(self.console) as progress:
            for epoch in range(state.epoch, self.schedule.epochs):
                finished = self._epoch(epoch, progress)
                line = _line(self.state.history[-1], self.schedule.epochs)
                self.console.print(line, soft_wrap=True)
                if not finished or self._out_of_time():
                    stopped = "max_minutes"
                    break
        return stopped

    def _epoch(self, epoch: int, progress: Progress) -> bool:
        """Trains and validates one epoch; returns False if the time limit ended it early."""
        state = self.state
        torch.manual_seed(self.options.seed * 1_000_003 + epoch)
        self.trainee.model.train()
        plan = self.trainee.plan(epoch)
        task = progress.add_task(f"epoch {epoch + 1}/{self.schedule.epochs}", total=len(plan))
        # A run that was interrupted within the epoch goes on with its next batch.
        state.restore_random()
        sums, targets, done = dict(state.sums), state.targets, state.batches
        earlier, earlier_targets = done, targets
        progress.update(task, advance=done)
        began = saved = time.monotonic()
        if epoch == state.epoch and not state.history:
            self.console.print(
                f"{len(plan)} batches an epoch, {self.schedule.epochs} epochs at most"
            )
        told = began
        for batch in plan[done:]:
            losses = self._step(batch, len(plan))
            targets, done = targets + losses.targets, done + 1
            for name, part in losses.parts.items():
                sums[name] = sums.get(name, 0.0) + float(part) * losses.targets
            speed = (targets - earlier_targets) / (time.monotonic() - began)
            shown = "  ".join(f"{name} {value / targets:.3f}" for name, value in sums.items())
            progress.update(task, advance=1, shown=f"{shown}  {speed:,.0f} targets/s")
            if not self.console.is_terminal and time.monotonic() - told > LOG_EVERY_S:
                told = time.monotonic()
                left_s = (told - began) * (len(plan) - done) / (done - earlier)
                share = f"epoch {epoch + 1}/{self.schedule.epochs}: {done / len(plan):.0%}"
                self.console.print(f"{share}  {shown}  {left_s:.0f} s left of it", soft_wrap=True)
            if self._estimates and time.monotonic() - began > ESTIMATE_AFTER_S:
                self._estimates = False
                batch_s = (time.monotonic() - began) / (done - earlier)
                self.console.print(self._estimate(batch_s * len(plan)))
            if self._out_of_time():
                break
            if time.monotonic() - saved > SAVE_EVERY_S and done < len(plan):
                state.seconds = self.earlier_s + self._elapsed_s()
                state.note_batches(done, targets, sums)
                save_checkpoint(state, self.checkpoint, self.recipe)
                saved = time.monotonic()
        seconds = time.monotonic() - began
        metrics = self._validate()
        progress.remove_task(task)
        state.begin_epoch()
        state.epoch = epoch + 1
        state.seconds = self.earlier_s + self._elapsed_s()
        speed = (targets - earlier_targets) / seconds
        losses_of_epoch = {name: value / targets for name, value in sums.items()}
        state.history.append(EpochRecord(epoch + 1, losses_of_epoch, metrics, state.seconds, speed))
        value = metrics[self.trainee.selection]
        if value > state.best_value or not state.best:
            state.best_value, state.best_epoch = value, epoch + 1
            state.best = {name: tensor.clone() for name, tensor in state.averaged.items()}
        save_checkpoint(state, self.checkpoint, self.recipe)
        return done == len(plan)

    def _estimate(self, epoch_s: float) -> str:
        """Returns how long the run will take if every epoch takes `epoch_s`."""
        all_s = min(epoch_s * (self.schedule.epochs - self.state.epoch), self.limit_s)
        took = f"{all_s:.0f} s" if all_s < 100 else f"{all_s / 60:.0f} min"
        return f"about {took} for all epochs, without validation"

    def _step(self, batch: Batch, steps_per_epoch: int) -> StepLoss:
        state, schedule = self.state, self.schedule
        in_steps = (state.step + 1) / (schedule.epochs * steps_per_epoch)
        progress = max(in_steps, self._elapsed_s() / self._training_s())
        for optimizer in state.optimizers:
            optimizer.zero_grad(set_to_none=True)
            for group in optimizer.param_groups:
                group["lr"] = schedule.learning_rate * schedule.factor(progress) * group["rate"]
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
            losses = self.trainee.loss(batch)
        losses.total.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.trainee.model.parameters(), schedule.max_norm)
        for optimizer in state.optimizers:
            optimizer.step()
        state.step += 1
        # A small decay in the first steps makes the average forget the initial weights.
        decay = min(schedule.averaging, (1 + state.step) / (10 + state.step))
        decay = decay if schedule.averaging else 0.0
        with torch.no_grad():
            averaged = [state.averaged[name] for name in self.named]
            torch._foreach_lerp_(averaged, list(self.named.values()), 1 - decay)
        return losses

    def _validate(self) -> dict[str, float]:
        """Returns the metrics of the averaged weights, which replace the model's for the
        validation.
        """
        began = self.limit.now()
        trained = {name: p.detach().clone() for name, p in self.named.items()}
        try:
            self._load(self.state.averaged)
            self.trainee.model.eval()
            with torch.no_grad():
                metrics = self.trainee.validate()
        finally:
            self._load(trained)
        self.state.validation_s = self.limit.now() - began
        return metrics

    @torch.no_grad()
    def _load(self, weights: dict[str, Tensor]) -> None:
        for name, parameter in self.named.items():
            parameter.copy_(weights[name])

    def _training_s(self) -> float:
        """Returns the seconds that training may take, so that a last validation fits in."""
        first = VALIDATION_SHARE * self.limit_s if not self.state.validation_s else 0.0
        return max(self.limit_s - max(self.state.validation_s, first), 1e-3)

    def _out_of_time(self) -> bool:
        return self._elapsed_s() >= self._training_s()

    def _elapsed_s(self) -> float:
        """Returns the seconds since this run began, without the runs that it resumes."""
        return self.limit.now() - self.began


def progress_bar(console: Console) -> Progress:
    """Returns a bar whose tasks have a field `shown`; it shows nothing but on a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%"),
        TextColumn("{task.fields[shown]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _line(record: EpochRecord, epochs: int) -> str:
    losses = "  ".join(f"{name} {value:.3f}" for name, value in record.losses.items())
    metrics = "  ".join(f"{name} {value:.4f}" for name, value in record.metrics.items())
    return (
        f"epoch {record.epoch}/{epochs}  {losses}  {metrics}  "
        f"{record.tokens_per_s:,.0f} targets/s  {record.seconds / 60:.1f} min"
    )
