"""Text steps recorded at start, one for each bucket of nodes and texts, and replayed.

On CUDA the record is a CUDA graph: a step is one upload, one launch and one download, whatever was
drafted. What fits no bucket steps as before. Most texts are judged by `sample`. Where a drafter
draws, steps that are judged by rejection are recorded too (`multi_step` is the same walk), and last
those in which each text has a rule of its own.
"""

from __future__ import annotations

import logging
import time
from bisect import insort
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from recserve.engine.runtime.cuda_recorder import CudaRecorder
from recserve.engine.runtime.runner import Runner
from recserve.engine.text.fixed_step import FixedStep, StepShape
from recserve.engine.text.text_rows import TextRow, TextRows
from recserve.engine.text.text_sequence import TextSequence
from recserve.engine.text.text_step import StepOutputs, TextGroup
from recserve.models.language_model import LanguageModel
from recserve.speculation.drafter import Drafter
from recserve.speculation.sampling_table import Room, SamplingTable
from recserve.speculation.verifiers.registry import FOR_ALL, MIXED, REJECTION, SAMPLE

log = logging.getLogger(__name__)

Step = Callable[[], StepOutputs]
Kind = tuple[bool, str | None, str]
# What became of a step: replayed, or launched because prompt tokens stood in its forward, as there
# is no place for what its drafts were drawn from, because of its parameters, of its nodes and
# texts, or as no row was left for a text.
Result = Literal["replayed", "prompt", "drawn", "parameters", "size", "rows"]
RESULTS: tuple[Result, ...] = get_args(Result)
# Nodes and texts; plain decoding, drafts of about eight nodes, and trees of 64 for few texts.
BUCKETS = ((2, 1), (16, 1), (16, 8), (40, 32), (72, 1), (72, 8), (72, 64), (264, 32), (520, 8))
SHAPES = tuple(StepShape(nodes, texts, min(nodes - 2, 16)) for nodes, texts in BUCKETS)
# Of [T, V] float32 that a step with every parameter holds at once, or one that is not judged by
# `sample` (test_record_memory.py). Records share that memory: the largest says what
# all take.
TABLES = 10.25


@dataclass(frozen=True)
class GraphLimits:
    """shapes: what is recorded, in this order, first for texts whose only parameter is the
    temperature. seconds, bytes: no record is begun after so long, with so much memory taken, or
    that takes more by itself.
    """

    shapes: tuple[StepShape, ...] = SHAPES
    room: Room = Room()
    seconds: float = 60.0
    bytes: int = 2 * 2**30


@dataclass(frozen=True)
class Bucket:
    """What one record is for.

    everything: texts of any sampling parameters; else those of a temperature at most. drafter:
    whose heads end the step, None: nobody's. rule: that judges it, SAMPLE, REJECTION or MIXED.
    """

    shape: StepShape
    everything: bool
    drafter: str | None = None
    rule: str = SAMPLE

    @property
    def name(self) -> str:
        """As `72x8`, nodes and texts; `72x8+` with every parameter, `72x8+ medusa` with heads,
        `72x8+ rejection` where not `sample` judges.
        """
        size = f"{self.shape.nodes}x{self.shape.sequences}{'+' if self.everything else ''}"
        name = self.drafter if self.rule == SAMPLE else self.rule
        return size if name is None else f"{size} {name}"

    @property
    def kind(self) -> Kind:
        """All but the shape."""
        return self.everything, self.drafter, self.rule

    def bytes(self, vocabulary: int) -> int:
        """What grows with the vocabulary of all that such a step holds at once."""
        plain = self.rule == SAMPLE and not self.everything
        return int(4 * vocabulary * self.shape.nodes * (1 if plain else TABLES))


@dataclass(frozen=True)
class RecordedStep:
    """One record and what it took: seconds and bytes."""

    bucket: Bucket
    seconds: float
    bytes: int
    step: FixedStep
    replay: Step


@dataclass(frozen=True)
class Replayed:
    """What a replay found, and the rows of its texts; the next one writes where all of it lies."""

    outputs: StepOutputs
    rows: list[TextRow]


class StepGraphs:
    """The recorded steps of one language model. counts: steps by what became of them, RESULTS."""

    @torch.inference_mode()
    def __init__(
        self,
        runner: Runner,
        model: LanguageModel,
        max_texts: int,
        limits: GraphLimits,
        record: Callable[[Step], Step],
        taken: Callable[[], int] = lambda: 0,
        drafters: Mapping[str, Drafter] | None = None,
    ) -> None:
        """max_texts: that run at once. taken: bytes that records have taken so far. drafters: by
        name; the steps of those that have ranked heads are recorded once more, with the heads, and
        for those that draw once more, judged by rejection.

        latest: the replay of the last step that was one.
        """
        size = runner.pool.page_size
        largest = max(shape.nodes for shape in limits.shapes)
        pages = -(-(model.config.decoder.max_positions + largest) // size)
        states = model.tokens.weight[:0]
        vocabulary = model.config.vocab_size
        self.rows = TextRows(runner.pool, max_texts + 1, pages * size, vocabulary, states)
        self.room = limits.room
        self.latest: Step | None = None
        self.counts: dict[Result, int] = dict.fromkeys(RESULTS, 0)
        found = {name: drafter.ranked_heads for name, drafter in (drafters or {}).items()}
        self._heads = {name: heads for name, heads in found.items() if heads is not None}
        self._names = {id((drafters or {})[name]): name for name in self._heads}
        self._told: tuple[SamplingTable | None, bool | None] = (None, None)
        self._recorded: dict[Kind, list[RecordedStep]] = {}
        self._draws = any(drafter.draws for drafter in (drafters or {}).values())
        self._most_drafted = max(shape.drafted for shape in limits.shapes)
        self._draft_values: Tensor | None = None
        self._wanted = self._buckets(limits.shapes)
        began, left = time.monotonic(), list[str]()
        for bucket in self._wanted:
            late = time.monotonic() - began > limits.seconds
            if late or max(taken(), bucket.bytes(vocabulary)) > limits.bytes:
                left.append(bucket.name)
                continue
            try:
                self._record(runner, model, bucket, record, taken)
            except Exception:  # Triton's errors have no other base
                log.exception("no graph of %s: such steps are launched as they come", bucket.name)
                break
        if left:
            log.warning("no time or memory is left to record the steps %s", ", ".join(left))

    def _buckets(self, shapes: Seq[StepShape]) -> list[Bucket]:
        """In the order in which they are recorded. Texts without a draft need no heads, and drawn
        drafts, most of them chains, need no place for more nodes than chains have.
        """
        sampled = [
            Bucket(shape, everything, drafter)
            for drafter in (None, *self._heads)
            for everything in (False, True)
            for shape in shapes
            if drafter is None or shape.depth
        ]
        rejected = [
            Bucket(shape, everything, rule=REJECTION)
            for everything in (False, True)
            for shape in shapes
            if self._draws and shape.for_chains
        ]
        mixed = [Bucket(shape, True, rule=MIXED) for shape in shapes if shape.depth]
        return sampled + rejected + mixed

    def _record(
        self,
        runner: Runner,
        model: LanguageModel,
        bucket: Bucket,
        record: Callable[[Step], Step],
        taken: Callable[[], int],
    ) -> None:
        began, before = time.monotonic(), taken()
        room = self.room if bucket.everything else None
        heads = None if bucket.drafter is None else self._heads[bucket.drafter]
        drawn = self._draws and bucket.rule != SAMPLE
        values = self._place_for_probs(bucket.shape) if drawn else None
        step = FixedStep(runner, model, self.rows, bucket.shape, room, heads, bucket.rule, values)
        replay = record(step)
        seconds, size = time.monotonic() - began, taken() - before
        made = RecordedStep(bucket, seconds, size, step, replay)
        insort(
            self._recorded.setdefault(bucket.kind, []),
            made,
            key=lambda r: (r.bucket.shape.nodes, r.bucket.shape.sequences),
        )
        log.info("recorded step %s: %.2f s, %.0f MiB", bucket.name, seconds, size / 2**20)

    def _place_for_probs(self, shape: StepShape) -> Tensor:
        """[shape.drafted, V] float32, the beginning of what all steps share: one runs at a time."""
        if self._draft_values is None:
            size = self._most_drafted, self.rows.seen.shape[1]
            self._draft_values = torch.empty(size, device=self.rows.seen.device)
        return self._draft_values[: shape.drafted]

    @property
    def recorded(self) -> list[RecordedStep]:
        """All of them, small ones of each kind first."""
        return [made for some in self._recorded.values() for made in some]

    @property
    def unrecorded(self) -> list[str]:
        """Names of what was to be recorded and is not: the log says why."""
        made = {recorded.bucket for recorded in self.recorded}
        return [bucket.name for bucket in self._wanted if bucket not in made]

    def step(self, groups: Seq[TextGroup], with_prompts: bool) -> Replayed | None:
        """Forward, judgement and move of the group in the smallest bucket that holds it; None if
        there is none, or tokens of prompts in the same forward.

        groups: one, as TextGroups forms them for records; none where prompts are all there is.
        """
        result, replayed = ("prompt", None) if with_prompts else self._replay(*groups)
        self.counts[result] += 1
        return replayed

    def _replay(self, group: TextGroup) -> tuple[Result, Replayed | None]:
        drawn = group.rule != SAMPLE and any(draft.probs is not None for draft in group.drafts)
        if drawn and self._draft_values is None:
            return "drawn", None
        everything = self._needs_everything(group)
        if everything is None:
            return "parameters", None
        best = self._smallest(group, everything)
        if best is None:
            return "size", None
        rows = best.step.load(group)
        if rows is None:
            return "rows", None
        self.latest = best.replay
        return "replayed", Replayed(best.replay(), rows)

    def _needs_everything(self, group: TextGroup) -> bool | None:
        """Whether the temperature is not the only parameter; None where there is no room for the
        others. Told once for as long as the same texts step.
        """
        table, needs = self._told
        if table is not group.table:
            needs = not group.table.plain or group.table.truncates
            if needs and not self.room.holds([context.params for context in group.contexts]):
                needs = None
            self._told = group.table, needs
        return needs

    def _smallest(self, group: TextGroup, everything: bool) -> RecordedStep | None:
        """The smallest bucket that holds a group, of the first kind that has one."""
        texts, depth = len(group.sizes), group.depth
        nodes = texts + sum(group.sizes)
        for kind in self._kinds(group, everything):
            for recorded in self._recorded.get(kind, ()):
                if recorded.bucket.shape.holds(texts, nodes, depth):
                    return recorded
        return None

    def _kinds(self, group: TextGroup, everything: bool) -> list[Kind]:
        """That judge a group as its texts ask, those that do least beside it first; with heads
        where they are those of all texts that are drafted for.
        """
        if group.rule != SAMPLE:
            mixed: list[Kind] = [(True, None, MIXED)]
            return [(everything, None, REJECTION), *mixed] if group.rule in FOR_ALL else mixed
        kinds: list[Kind] = [(everything, None, SAMPLE)]
        if self._names and group.depth:
            drafted = zip(group.sequences, group.sizes, strict=True)
            drafters = {id(text.drafter) for text, size in drafted if size}
            name = self._names.get(drafters.pop()) if len(drafters) == 1 else None
            if name is not None:
                kinds.insert(0, (everything, name, SAMPLE))
        return kinds

    def forget(self, text: TextSequence) -> None:
        """The text ended, or was set aside."""
        self.rows.forget(text)


def cuda_graphs(
    runner: Runner,
    model: LanguageModel,
    max_texts: int,
    wanted: bool | None,
    limits: GraphLimits,
    drafters: Mapping[str, Drafter],
) -> StepGraphs | None:
    """wanted: None: where the model is on a CUDA device.

    Raises ValueError where they are wanted and it is not.
    """
    device = runner.pool.keys.device
    if device.type == "cuda" and torch.cuda.is_available() and wanted is not False:
        recorder = CudaRecorder()
        return StepGraphs(
            runner, model, max_texts, limits, recorder, lambda: recorder.bytes, drafters
        )
    if wanted:
        raise ValueError(f"graphs is true; they need a CUDA device and the model is on {device}")
    return None
