"""Memory of captured steps and drafts that grows with the vocabulary, counted operator by
operator.
"""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recserve.drafters.draft_model.drafter import ModelDrafter
from recserve.drafters.none import NoDrafter
from recserve.engine.capture import EagerRecorder
from recserve.engine.draft_graph import DraftGraphs, DraftLimits, draft_buckets
from recserve.engine.text_step_graph import TABLES, StepShape, TextStepGraphs, TextStepLimits
from recserve.engine.text_trees import CapturedDrafts
from recserve.kernels.acceptance import acceptance
from recserve.kernels.cache import moves
from tests.support import triton_interpreter  # noqa: F401
from tests.support.block_drafter import block
from tests.support.mtp_drafter import mtp, peagle
from tests.support.specformer_drafter import specformer
from tests.support.text_engines import eagle, engine_for
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


@torch.inference_mode()
def test_steps_share_the_memory_of_their_logits():
    """Each of them returns its logits there, so no graph has a table of its own."""
    model = drawn_language_model(64, 1, 500, torch.float32)
    scheduler = engine_for(model).schedulers["text"]
    shapes = (StepShape(16, 4, 8), SHAPE, StepShape(2, 1, 0))
    limits = TextStepLimits(shapes, seconds=float("inf"))
    graphs = TextStepGraphs(scheduler.runner, scheduler.kv, model, limits, EagerRecorder())
    logits = [graph.replay().logits for graph in graphs.captured]
    assert {len(own) for own in logits} == {2, 16, SHAPE.nodes} and len(logits) > 6
    assert len({own.untyped_storage().data_ptr() for own in logits}) == 1
    assert logits[0].untyped_storage().nbytes() == 4 * 500 * SHAPE.nodes


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
    # The last operator writes to the logits that all steps share, which count from then on.
    assert found["plain"] == 2.0 and 1.0 < found["rejection"] < TABLES
    for name in ("+", "+ rejection", "+ mixed"):
        assert found[name] == pytest.approx(TABLES, abs=0.5), name


DRAFTERS = {
    "eagle3": lambda model: eagle(model, fused=True),
    "mtp": mtp,
    "peagle": peagle,
    "draft-model": lambda model: ModelDrafter(model, model.config.vocab_size, (2, 3, 1)),
    "dflash": lambda model: block(model, "dflash"),
    "dflash2": lambda model: block(model, "dflash2"),
    "dspark-rnn": lambda model: block(model, "dspark-rnn"),
    "specformer": specformer,
}


def capture_drafts(model, drafter, limits, recorder):
    """Returns the captured drafts of one drafter."""
    kv = engine_for(model, drafters={drafter.name: drafter}).schedulers["text"].kv
    place = CapturedDrafts.allocate(len(kv.slots), 64, kv.slots.device)
    return DraftGraphs(kv, model, {drafter.name: drafter}, place, limits, recorder)


@pytest.mark.parametrize("kind", DRAFTERS)
@torch.inference_mode()
def test_a_draft_that_cannot_fit_is_not_tried(kind):
    """Smaller drafts are captured, though some come after it."""
    model = drawn_language_model(64, 1, 500, torch.float32)
    drafter, tried = DRAFTERS[kind](model), []
    tree = next(form for form in drafter.forms if form.name == "tree")
    most = 32 * drafter.min_bytes(tree, greedy=False) - 1
    limits = DraftLimits((1, 8, 32), seconds=float("inf"), bytes=most)
    buckets = draft_buckets({drafter.name: drafter}, limits)

    class Noted(EagerRecorder):
        def __call__(self, step):
            tried.append(step.bucket.name)
            return step

    graphs = capture_drafts(model, drafter, limits, Noted())
    assert graphs.missing == [bucket.name for bucket in buckets if bucket.bytes > most]
    assert tried == [bucket.name for bucket in buckets if bucket.bytes <= most]
    name, large = drafter.name, f"{drafter.name} tree {tree.depth}x32+"
    assert large in graphs.missing
    assert {f"{name} tree {tree.depth}x8", f"{name} read 32"} <= set(tried)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DRAFTERS)
@torch.inference_mode()
def test_a_draft_holds_so_many_tables(kind):
    """Those inside an operator are not seen: `logsumexp` holds one of the rows that it sums."""
    tables, model = {}, drawn_language_model(64, 1, 2003, torch.float32)
    drafter = DRAFTERS[kind](model)
    config = model.config if not hasattr(drafter, "network") else drafter.network.config
    vocabulary = getattr(config, "draft_vocab_size", 2003)  # numbers that no other axis has

    class Measured(EagerRecorder):
        def __call__(self, step):
            with Peak(vocabulary) as peak:
                step()
            tables[step.bucket] = peak.bytes
            return step

    limits = DraftLimits((4,), seconds=float("inf"))
    graphs = capture_drafts(model, drafter, limits, Measured())
    assert not graphs.missing
    for bucket, size in tables.items():
        unseen = 4 * 4 * vocabulary if kind == "dspark-rnn" else bucket.bytes // 3
        sums = bucket.form.depth and (drafter.name == "block" or not bucket.greedy)
        assert size + unseen * bool(sums) == bucket.bytes, bucket.name
