"""Text steps recorded at start, one for each bucket of nodes and texts, and replayed.

On CUDA the record is a CUDA graph: a step is one upload, one launch and one download, whatever was
drafted. What fits no bucket steps as before.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from recserve.core.sampling_table import Room
from recserve.engine.fixed_step import FixedStep, StepShape
from recserve.engine.runner import Runner
from recserve.engine.text_rows import TextRows
from recserve.engine.text_sequence import TextSequence
from recserve.engine.text_step import StepOutputs, TextGroup
from recserve.models.language_model import LanguageModel
from recserve.verify.rules import SAMPLE

log = logging.getLogger(__name__)

Step = Callable[[], StepOutputs]
# Nodes and texts; plain decoding, drafts of about eight nodes, and trees of 64 for few texts.
BUCKETS = ((2, 1), (16, 1), (16, 8), (40, 32), (72, 1), (72, 8), (72, 64), (264, 32), (520, 8))
SHAPES = tuple(StepShape(nodes, texts, min(nodes - 2, 16)) for nodes, texts in BUCKETS)
WARM_UP = 2


@dataclass(frozen=True)
class GraphLimits:
    """shapes: what is recorded, in this order, first for texts whose only parameter is the
    temperature. seconds, bytes: no record is begun after so long, or with so much memory taken.
    """

    shapes: tuple[StepShape, ...] = SHAPES
    room: Room = Room()
    seconds: float = 60.0
    bytes: int = 2 * 2**30


class CudaRecorder:
    """Records a step as a CUDA graph; all of them share one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._before = torch.cuda.memory_reserved()

    @property
    def bytes(self) -> int:
        """Memory taken since the first record."""
        return torch.cuda.memory_reserved() - self._before

    def __call__(self, step: Step) -> Step:
        """The replay; its outputs lie where the record left them."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):  # kernels are compiled and libraries take their workspaces
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = step()

        def replay() -> StepOutputs:
            graph.replay()
            return outputs

        return replay


@dataclass(frozen=True)
class _Recorded:
    step: FixedStep
    replay: Step


class StepGraphs:
    """The recorded steps of one language model."""

    @torch.inference_mode()
    def __init__(
        self,
        runner: Runner,
        model: LanguageModel,
        max_texts: int,
        limits: GraphLimits,
        record: Callable[[Step], Step],
        taken: Callable[[], int] = lambda: 0,
    ) -> None:
        """max_texts: that run at once. taken: bytes that records have taken so far.

        latest: the replay of the last step that was one.
        """
        size = runner.pool.page_size
        largest = max(shape.nodes for shape in limits.shapes)
        pages = -(-(model.config.decoder.max_positions + largest) // size)
        self.rows = TextRows(runner.pool, max_texts + 1, pages * size, model.config.vocab_size)
        self.room = limits.room
        self.latest: Step | None = None
        self._recorded: dict[bool, list[_Recorded]] = {False: [], True: []}
        began = time.monotonic()
        for everything in (False, True):
            for shape in limits.shapes:
                if time.monotonic() - began > limits.seconds or taken() > limits.bytes:
                    log.warning("no time or memory is left for a graph of %s", shape)
                    continue
                room = self.room if everything else None
                step = FixedStep(runner, model, self.rows, shape, room)
                try:
                    self._recorded[everything].append(_Recorded(step, record(step)))
                except RuntimeError:
                    log.exception("no graph of %s: such steps are launched as they come", shape)
                    return

    @property
    def names(self) -> list[str]:
        """What is recorded, as `nodes x texts`; with a `+` where every parameter is allowed."""
        return [
            f"{r.step.shape.nodes}x{r.step.shape.sequences}{'+' if everything else ''}"
            for everything, recorded in self._recorded.items()
            for r in recorded
        ]

    def step(self, groups: Seq[TextGroup]) -> StepOutputs | None:
        """Forward, judgement and move of one group in the smallest bucket that holds it; None if
        there is none, or more groups than one.
        """
        if len(groups) != 1 or groups[0].rule != SAMPLE:
            return None
        group, table = groups[0], groups[0].table
        everything = not table.plain or table.truncates
        params = [text.request.params for text in group.sequences]
        if everything and not self.room.holds(params):
            return None
        fitting = [r for r in self._recorded[everything] if r.step.shape.holds(group)]
        if not fitting:
            return None
        best = min(fitting, key=lambda r: (r.step.shape.nodes, r.step.shape.sequences))
        if not best.step.load(group):
            return None
        self.latest = best.replay
        return best.replay()

    def forget(self, text: TextSequence) -> None:
        """The text ended, or was set aside."""
        self.rows.forget(text)


def cuda_graphs(
    runner: Runner,
    model: LanguageModel,
    max_texts: int,
    wanted: bool | None,
    limits: GraphLimits,
) -> StepGraphs | None:
    """wanted: None: where the model is on a CUDA device.

    Raises ValueError where they are wanted and it is not.
    """
    device = runner.pool.keys.device
    if device.type == "cuda" and torch.cuda.is_available() and wanted is not False:
        recorder = CudaRecorder()
        return StepGraphs(runner, model, max_texts, limits, recorder, lambda: recorder.bytes)
    if wanted:
        raise ValueError(f"graphs is true; they need a CUDA device and the model is on {device}")
    return None
