"""Memory of a recorded text step that grows with the vocabulary, counted operator by operator."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recserve.drafters.none import NoDrafter
from recserve.engine.capture import EagerRecorder
from recserve.engine.text_step_graph import TABLES, StepShape, TextStepGraphs, TextStepLimits
from recserve.kernels.acceptance import acceptance
from recserve.kernels.cache import moves
from tests.support import triton_interpreter  # noqa: F401
from tests.support.text_engines import engine_for
from tests.support.walking_model import drawn_language_model

pytest.importorskip("triton")

from recserve.kernels.acceptance import triton_accept, triton_accept_drawn
from recserve.kernels.cache import triton_moves

SHAPE = StepShape(40, 4, 16)


class Peak(TorchDispatchMode):
    """bytes: most that tensors of a row for each token held at once."""

    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary, self.live, self.bytes = vocabulary, {}, 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        outputs = operator(*args, **(kwargs or {}))
        self.live = {k: one for k, one in self.live.items() if not one[0].expired()}
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor) and self.vocabulary in tensor.shape:
                storage = tensor.untyped_storage()
                made = StorageWeakRef(storage)
                self.live.setdefault(made.cdata, (made, storage.nbytes()))
        self.bytes = max(self.bytes, sum(size for _, size in self.live.values()))
        return outputs


class Draws(NoDrafter):
    """A drafter that says it draws, so that there are records of `rejection`."""

    draws = True


@torch.inference_mode()
def test_what_is_too_large_is_launched_and_the_rest_recorded():
    """Smaller steps of every kind, though they come after it."""
    vocabulary, small = 500, StepShape(16, 4, 8)
    model = drawn_language_model(64, 1, vocabulary, torch.float32)
    scheduler = engine_for(model).schedulers["text"]
    between = int(4 * TABLES * vocabulary * (SHAPE.nodes - 1))
    limits = TextStepLimits((small, SHAPE), seconds=float("inf"), bytes=between)
    graphs = TextStepGraphs(
        scheduler.runner, scheduler.kv, model, limits, EagerRecorder(), {"drawn": Draws()}
    )
    large = {f"40x4{kind}" for kind in ("+", " rejection", "+ rejection", "+ mixed")}
    assert set(graphs.missing) == large
    made = {graph.bucket.name for graph in graphs.captured}
    assert made == {"40x4"} | {
        f"16x4{n}" for n in ("", "+", " rejection", "+ rejection", "+ mixed")
    }


@pytest.mark.slow
@torch.inference_mode()
def test_a_step_holds_so_many_tables(monkeypatch):
    """What the fused kernels need no memory for is not counted, as on a GPU."""
    monkeypatch.setattr(acceptance, "accept", triton_accept.accept)
    monkeypatch.setattr(acceptance, "accept_drawn", triton_accept_drawn.accept_drawn)
    monkeypatch.setattr(moves, "move_paths", triton_moves.move_paths)
    vocabulary, tables = 2003, []  # a number that no other axis has
    model = drawn_language_model(64, 1, vocabulary, torch.float32)

    class Measured(EagerRecorder):
        def __call__(self, step):
            with Peak(vocabulary) as peak:
                step()
            tables.append(peak.bytes / (4 * SHAPE.nodes * vocabulary))
            return step

    scheduler = engine_for(model).schedulers["text"]
    limits = TextStepLimits((SHAPE,), seconds=float("inf"))
    graphs = TextStepGraphs(
        scheduler.runner, scheduler.kv, model, limits, Measured(), {"drawn": Draws()}
    )
    found = dict(zip(["plain", "+", "rejection", "+ rejection", "+ mixed"], tables, strict=True))
    assert not graphs.missing
    assert found["plain"] == 1.0 and 1.0 < found["rejection"] < TABLES
    for name in ("+", "+ rejection", "+ mixed"):
        assert found[name] == pytest.approx(TABLES, abs=0.5), name
