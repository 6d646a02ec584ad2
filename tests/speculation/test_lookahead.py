"""Lookahead against the algorithm written down plainly: one full forward for every window node."""

import pytest
import torch

from recserve.drafters.lookahead import LookaheadDrafter, NgramPool
from recserve.drafters.shared.draft_tree import ROOT, DraftTree
from recserve.kernels.tree import AUXILIARY, chain
from recserve.speculation.completion import TextQuery
from recserve.speculation.draft import Budget
from recserve.speculation.drafter import TextContext
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.support.text_engines import engine_for, prompts, shared_model
from tests.support.text_loop import VOCABULARY, check_draft, generate, score, step, tiny_model
from tests.support.token_paths import paths


def best(model, tokens) -> int:
    """The likeliest token after some."""
    row = model.logits(score(model, tokens[:-1], chain(torch.tensor(tokens[-1:]))))
    return int(row[0].argmax())


class PlainLookahead:
    """The window, the pool and the greedy text, with lists and full forwards."""

    def __init__(self, model, prompt, window, ngram, guesses, row):
        self.model, self.tokens = model, list(prompt)
        self.size, self.ngram, self.guesses = window, ngram, guesses
        self.rows = [list(row)]
        self.pool: dict[int, list[tuple[int, ...]]] = {}

    def candidates(self) -> list[tuple[int, ...]]:
        return self.pool.get(self.tokens[-1], [])[::-1]

    def add(self, first, rest):
        own = self.pool.setdefault(first, [])
        if rest in own:
            own.remove(rest)
        own.append(rest)
        del own[: -self.guesses]

    def step(self) -> list[int]:
        """Committed tokens; the window moves."""
        last = self.tokens[-1]
        width = len(self.rows[0]) + 1
        new = []
        for j in range(width):
            column = [row[j] for row in self.rows[1:]]
            new.append(best(self.model, [*self.tokens, *self.rows[0][:j], *column]))
        committed = [best(self.model, self.tokens)]
        alive = self.candidates()
        while alive := [g for g in alive if g[: len(committed)] == tuple(committed)]:
            committed.append(best(self.model, [*self.tokens, *committed]))
            if len(committed) == self.ngram:
                break
        if len(self.rows) == self.ngram - 1:
            for j in range(width):
                first = last if j == 0 else self.rows[0][j - 1]
                self.add(first, (*(row[j] for row in self.rows[1:]), new[j]))
            moved = [*self.rows[1:], new]
            self.rows = [moved[0][1:], *moved[1:]]
        else:
            self.rows = [row[1:] for row in [*self.rows, new]]
        self.tokens += committed
        return committed


@pytest.mark.parametrize(
    "window,ngram,guesses",
    [
        (5, 4, 5),
        (1, 3, 2),
        (4, 2, 3),
        pytest.param(3, 3, 1, marks=pytest.mark.slow),
        pytest.param(6, 5, 7, marks=pytest.mark.slow),
    ],
)
@torch.inference_mode()
def test_every_step_is_the_plain_algorithm_s(window, ngram, guesses):
    model, prompt = tiny_model(), [3, 1, 4, 1, 5, 9, 2]
    drafter = LookaheadDrafter(window, ngram, guesses, from_text=False)
    params = SamplingParams(0.0, seed=8, max_tokens=60)
    context = TextContext(0, list(prompt), len(prompt), params, Speculation("test"))
    plain = None
    accepted = 0
    for _ in range(30):
        draft = drafter.propose([context], [Budget(1000, 1000)])[0]
        rows = drafter._windows[0].rows
        if plain is None:
            assert len(rows) == 1 and len(rows[0]) == window + ngram - 3
            assert set(rows[0]) <= set(prompt)
            plain = PlainLookahead(model, prompt, window, ngram, guesses, rows[0])
        assert context.tokens == plain.tokens and rows == plain.rows
        check_draft(draft, Budget(1000, 1000), VOCABULARY)
        kinds = [0] * len(draft) if draft.kinds is None else draft.kinds.tolist()
        candidates = {
            path
            for path, kind in zip(paths(draft), kinds, strict=True)
            if kind != AUXILIARY and len(path) == ngram - 1
        }
        assert candidates == set(plain.candidates())
        width = len(rows[0]) + 1
        assert sum(kind == AUXILIARY for kind in kinds) == width * len(rows) - 1
        outcome = step(model, context, draft, "greedy")
        drafter.commit([outcome])
        assert context.tokens[-len(outcome.accepted) - 1 :] == plain.step()
        accepted += len(outcome.accepted)
    assert accepted > 0 or (window, ngram) in {(1, 3), (3, 3)}


@torch.inference_mode()
def test_a_whole_ngram_is_followed_by_a_bonus_token():
    """The original commits N - 1 tokens there."""
    written = generate(
        tiny_model(), [[6, 27]], SamplingParams(0.0, max_tokens=60), LookaheadDrafter(ngram=3)
    )
    assert max(written[0].lengths) == 2
    assert sum(written[0].lengths) + len(written[0].lengths) == 60


def test_without_room_for_the_window_the_pool_is_drafted_alone():
    drafter = LookaheadDrafter(window=5, ngram=4, guesses=5)
    tokens = [1, 2, 3, 4, 5, 1]
    context = TextContext(0, tokens, 6, SamplingParams(), Speculation("test"))
    for nodes, depth in ((3, 9), (2, 9), (9, 2), (0, 5), (5, 0)):
        draft = drafter.propose([context], [Budget(nodes, depth)])[0]
        check_draft(draft, Budget(nodes, depth), 6)
        assert draft.kinds is None
        assert draft.tokens.tolist() == [2, 3, 4][: min(nodes, depth)]
    chained = TextContext(1, tokens, 6, SamplingParams(), Speculation("test", "rejection"))
    assert drafter.propose([chained], [Budget(99, 99)])[0].kinds is None
    drafter.forget(0)
    drafter.forget(1)
    assert not drafter._windows


def test_stop_tokens_do_not_enter_the_window():
    model = tiny_model()
    params = SamplingParams(0.0, max_tokens=40, stop_token_ids=tuple(range(20, 29)))
    drafter = LookaheadDrafter(from_text=False)
    context = TextContext(0, [1, 2, 3], 3, params, Speculation("test"))
    for _ in range(12):
        with torch.inference_mode():
            draft = drafter.propose([context], [Budget(99, 99)])[0]
            drafter.commit([step(model, context, draft, "greedy")])
        assert all(token < 20 for row in drafter._windows[0].rows for token in row)


def test_the_pool_keeps_what_was_used_last():
    pool = NgramPool(guesses=2, capacity=2)
    for rest in ((1,), (2,), (1,), (3,)):
        pool.add(7, rest)
    assert pool.get(7) == [(3,), (1,)] and len(pool) == 2
    pool.add(8, (1,))
    pool.add(7, (3,))
    pool.add(9, (1,))
    assert pool.get(8) == [] and pool.get(7) == [(3,), (1,)] and pool.get(9) == [(1,)]


def test_numbers_out_of_range_are_refused():
    for wrong in ({"window": 0}, {"ngram": 1}, {"guesses": 0}, {"pool_size": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} {next(iter(wrong.values()))}"):
            LookaheadDrafter(**wrong)


def test_nodes_of_the_window_are_no_levels():
    """kappa divides the levels that may be accepted by the tokens that may be."""
    tree = DraftTree()
    tree.add(ROOT, 1)
    tree.add_auxiliary(tree.add_auxiliary(ROOT, 2), 3)
    draft = tree.finish(tree.preorder())
    assert (draft.depth, draft.levels, draft.num_candidates) == (2, 1, 1)
    engine = engine_for(shared_model(), drafters={"lookahead": LookaheadDrafter(window=3, ngram=3)})
    params = SamplingParams(temperature=0.0, max_tokens=30)
    (answer,) = engine.run_many([TextQuery(prompts(1)[0], params, Speculation("lookahead"))])
    assert 0 < answer.counts.num_draft_levels <= answer.counts.num_draft_tokens
