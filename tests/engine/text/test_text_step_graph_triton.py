"""A text step in fixed shapes through the Triton kernels, interpreted: what a graph launches."""

import pytest

from recserve.drafters.draft_model.drafter import ModelDrafter
from recserve.engine.text_step_graph import StepShape
from recserve.kernels.acceptance import acceptance
from recserve.kernels.attention import attention
from recserve.kernels.cache import moves
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.support import triton_interpreter  # noqa: F401
from tests.support.grids import chosen
from tests.support.recorded_steps import POISON, Counted, with_graphs
from tests.support.text_engines import PARAMETERS, engine_for, prompts
from tests.support.text_plain import VOCABULARY, TableDrafter, drawn_model, plain

triton = pytest.importorskip("triton")

from recserve.kernels.acceptance import triton_accept, triton_accept_drawn  # noqa: E402
from recserve.kernels.attention import triton_attention  # noqa: E402
from recserve.kernels.cache import triton_moves  # noqa: E402

SHAPES = (StepShape(16, 1, 6), StepShape(14, 3, 5), StepShape(30, 3, 6))


def drawing(model):
    """Drafters that are mostly right, and mostly wrong."""
    models = {"close": model, "far": drawn_model(3)}
    return {name: ModelDrafter(each, VOCABULARY, (1,) * 3) for name, each in models.items()}


@pytest.fixture(scope="module")
def engine():
    """Padded steps run anew each time; what they dispatch is the kernels."""
    model = drawn_model(1)
    launched = []

    def kernel_attention(batch, *rest):
        if not batch.fixed_shapes:
            return stock(batch, *rest)
        launched.append(batch.tree.num_nodes)
        return triton_attention.TritonTreeAttention(batch, *rest)

    stock = attention.tree_attention
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(acceptance, "accept", triton_accept.accept)
        patch.setattr(acceptance, "accept_drawn", triton_accept_drawn.accept_drawn)
        patch.setattr(moves, "move_paths", triton_moves.move_paths)
        made = with_graphs(model, Counted(lambda step: step), SHAPES, drafters=drawing(model))
        made.schedulers["text"].runner.attention = kernel_attention
        yield model, made, launched


@pytest.mark.slow
@pytest.mark.parametrize("name", ["warm", "everything"])
def test_kernels_write_the_plain_text(name, engine):
    """Trees with wrong siblings, alone, and three together with other parameters."""
    model, made, launched = engine
    texts, requests, wanted = {}, [], []
    for number, prompt in enumerate(prompts(3)):
        fields = PARAMETERS[name if number != 1 else "top-p"]
        params = SamplingParams(**{"seed": number} | fields | {"max_tokens": 6})
        tokens, *_ = plain(model, prompt.tolist(), params)
        texts[tuple(prompt.tolist())] = tokens
        requests.append(TextQuery(prompt, params, Speculation("table", num_tokens=6)))
        wanted.append(tokens)
    made.drafters["table"] = TableDrafter("tree", texts)
    before = len(launched)
    answers = [made.run(requests[0]), *made.run_many(requests)]
    assert [a.tokens.tolist() for a in answers] == [wanted[0], *wanted]
    assert sum(a.counts.num_accepted_tokens for a in answers) > 0
    assert len(launched) - before >= answers[0].timing.forwards - 1
    assert (made.schedulers["text"].runner.pool.keys == POISON).any()


@pytest.mark.parametrize("name", chosen(("warm", "everything"), "everything"))
def test_kernels_reject_as_the_host_does(name, engine):
    """Two chains side by side, over rows of probs in one place."""
    model, made, launched = engine
    requests = []
    for number, prompt in enumerate(prompts(2)):
        fields = {"seed": number} | PARAMETERS[name if number != 1 else "top-p"]
        params = SamplingParams(**fields | {"max_tokens": 6})
        requests.append(
            TextQuery(prompt, params, Speculation(("close", "far")[number % 2], "rejection"))
        )
    before, counts = len(launched), dict(made.schedulers["text"].graphs.counts)
    answers = made.run_many(requests)
    wanted = engine_for(model, drafters=drawing(model)).run_many(requests)
    assert [a.tokens.tolist() for a in answers] == [a.tokens.tolist() for a in wanted]
    assert sum(a.counts.num_accepted_tokens for a in answers) > 0
    assert len(launched) > before
    assert made.schedulers["text"].graphs.counts["replayed"] > counts["replayed"]
