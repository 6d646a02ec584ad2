"""Merged drafts: shared prefixes, shares of the budget, outcomes told apart."""

import numpy as np
import pytest
import torch

from recserve.drafters.draft_model.drafter import ModelDrafter
from recserve.drafters.merged import MergedDrafter
from recserve.drafters.suffix.drafter import SuffixDrafter
from recserve.kernels.tree import AUXILIARY
from recserve.speculation.draft import Budget, TextDraft, empty_draft
from recserve.speculation.drafter import Drafter, TextContext, TextOutcome
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.support.grids import covering
from tests.support.specformer_drafter import specformer
from tests.support.text_engines import (
    among_others,
    assert_forgotten,
    assert_no_leak,
    eagle,
    engine_for,
    shared_model,
)
from tests.support.text_loop import check_draft
from tests.support.text_plain import VOCABULARY
from tests.support.token_paths import paths


def draft(tokens, parents, **columns) -> TextDraft:
    depths: list[int] = []
    for parent in parents:
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return TextDraft(torch.tensor(tokens), torch.tensor(parents), max(depths, default=0), **columns)


class Fixed(Drafter):
    """Proposes one draft, cut to nothing where the budget is too small; remembers what it heard."""

    def __init__(self, own: TextDraft) -> None:
        self.own, self.budgets, self.heard, self.forgotten = own, [], [], []

    def propose(self, contexts, budgets):
        self.budgets.append(budgets)
        fits = [b.num_nodes >= len(self.own) and b.depth >= self.own.depth for b in budgets]
        return [self.own if fit else empty_draft() for fit in fits]

    def commit(self, outcomes):
        self.heard += outcomes

    def forget(self, context_id):
        self.forgotten.append(context_id)


def context(rule="sample", id=0) -> TextContext:
    return TextContext(id, [1, 2], 2, SamplingParams(), Speculation("test", rule))


FIRST = draft([5, 6, 7, 8], [-1, 0, 0, -1])
#   5 -+- 6          5 -- 7 -- 9
#   8  `- 7          4
SECOND = draft([5, 7, 9, 4], [-1, 0, 1, -1])


def outcome(whole: TextDraft, accepted: tuple[int, ...]) -> TextOutcome:
    rows = torch.arange(len(whole) + 1)[:, None]
    return TextOutcome(context(), whole, accepted, rows.double(), rows.float())


def test_equal_prefixes_are_one_node():
    merged = MergedDrafter([Fixed(FIRST), Fixed(SECOND)])
    whole = merged.propose([context()], [Budget(20, 5)])[0]
    check_draft(whole, Budget(20, 5), 10)
    assert sorted(paths(whole)) == [(4,), (5,), (5, 6), (5, 7), (5, 7, 9), (8,)]
    assert whole.depth == 3 and whole.probs is None


def test_every_source_hears_of_its_own_nodes():
    sources = [Fixed(FIRST), Fixed(SECOND)]
    merged = MergedDrafter(sources)
    whole = merged.propose([context()], [Budget(20, 5)])[0]
    order = paths(whole)
    path = tuple(order.index(p) for p in ((5,), (5, 7), (5, 7, 9)))
    merged.commit([outcome(whole, path)])
    for source, accepted in zip(sources, ((0, 2), (0, 1, 2)), strict=True):
        (heard,) = source.heard
        assert heard.draft is source.own and heard.accepted == accepted
        expected = [0, *(1 + order.index(p) for p in paths(source.own))]
        assert heard.logits[:, 0].tolist() == expected and heard.hidden[:, 0].tolist() == expected
    merged.forget(0)
    assert [source.forgotten for source in sources] == [[0], [0]]


def test_a_draft_that_was_not_scored_is_told_as_empty():
    sources = [Fixed(FIRST), Fixed(SECOND)]
    merged = MergedDrafter(sources)
    merged.propose([context()], [Budget(20, 5)])
    merged.commit([outcome(empty_draft(), ())])
    assert all(len(source.heard[0].draft) == 0 for source in sources)
    assert all(source.heard[0].logits.shape[0] == 1 for source in sources)


def test_shares_of_the_budget():
    sources = [Fixed(FIRST), Fixed(SECOND)]
    merged = MergedDrafter(sources)
    for nodes, first, second in ((20, 10, 16), (8, 4, 4), (7, 4, 3), (6, 3, 6), (0, 0, 0)):
        whole = merged.propose([context()], [Budget(nodes, 5)])[0]
        check_draft(whole, Budget(nodes, 5), 10)
        assert sources[0].budgets[-1][0].num_nodes == first
        assert sources[1].budgets[-1][0].num_nodes == second


def test_rules_for_chains_get_the_first_source_that_has_something():
    chain = draft([5, 6], [-1, 0])
    for sources in ([Fixed(empty_draft()), Fixed(chain)], [Fixed(chain), Fixed(FIRST)]):
        whole = MergedDrafter(sources).propose([context("rejection")], [Budget(9, 5)])[0]
        assert whole.tokens.tolist() == [5, 6]


def test_drawn_drafts_stand_side_by_side():
    """The same token drawn by both is two tries, each with its own distribution."""
    drawn = [
        draft([5, 6], [-1, 0], probs=torch.full((2, 10), 0.1)),
        draft([5, 7], [-1, 0], probs=torch.full((2, 10), 0.2)),
    ]
    sources = [Fixed(d) for d in drawn]
    merged = MergedDrafter(sources)
    whole = merged.propose([context("multi_step")], [Budget(9, 5)])[0]
    check_draft(whole, Budget(9, 5), 10)
    assert whole.tokens.tolist() == [5, 6, 5, 7] and whole.parents.tolist() == [-1, 0, -1, 2]
    assert torch.equal(whole.probs, torch.cat([d.probs for d in drawn]))
    merged.commit([outcome(whole, (2, 3))])
    assert [s.heard[0].accepted for s in sources] == [(), (0, 1)]


def test_drawn_and_chosen_together_are_chosen():
    drawn = draft([5], [-1], probs=torch.full((1, 10), 0.1))
    whole = MergedDrafter([Fixed(drawn), Fixed(SECOND)]).propose([context()], [Budget(9, 5)])[0]
    assert whole.probs is None and len(whole) == 4


def test_auxiliary_nodes_are_never_shared():
    kinds = torch.tensor([AUXILIARY, AUXILIARY])
    window = draft([5, 6], [-1, 0], kinds=kinds)
    sources = [Fixed(window), Fixed(SECOND), Fixed(window)]
    whole = MergedDrafter(sources).propose([context(), context(id=1)], [Budget(30, 5)] * 2)[1]
    check_draft(whole, Budget(30, 5), 10)
    assert len(whole) == 8 and int((whole.kinds == AUXILIARY).sum()) == 4


@pytest.mark.parametrize(
    "pages,make", covering((300, 14), {"eagle": eagle, "specformer": specformer})
)
def test_a_source_that_reads_the_target_s_states(make, pages):
    """Joined with a lookup drafter it proposes what it proposes alone, from pages of its own."""
    model = shared_model()
    reader = make(model, False) if make is eagle else make(model)
    merged = MergedDrafter([SuffixDrafter(), reader])
    engine = engine_for(model, pages, {"merged": merged})
    proposed = set()
    for source in merged.sources:

        def noted(contexts, budgets, source=source, propose=source.propose):
            drafts = propose(contexts, budgets)
            if any(map(len, drafts)):
                proposed.add(source)
            return drafts

        source.propose = noted
    for _ in range(2):  # the second time from cached prefixes
        requests, wanted = among_others("everything", Speculation("merged"))
        answers = engine.run_many(requests)
        assert [answer.tokens.tolist() for answer in answers] == wanted
    assert proposed == set(merged.sources)
    assert_no_leak(engine)
    assert_forgotten(merged)


READERS = {
    "eagle": lambda m: eagle(m, fused=False),
    "eagle3": lambda m: eagle(m, fused=True),
    "specformer": specformer,
    "draft_model": lambda m: ModelDrafter(m, VOCABULARY, (1,) * 3),
}


def states_read(drafter) -> dict[tuple[int, ...], torch.Tensor]:
    """Returns a dictionary that receives each state, by the tokens up to the one after it."""
    found, read = {}, drafter.read

    def noted(parts):
        for part in parts:
            for place, row in enumerate(part.states):
                found[tuple(part.context.tokens[: part.first + place + 2])] = row
        read(parts)

    drafter.read = noted
    return found


@pytest.mark.parametrize("seed", range(2))
def test_each_source_receives_the_states_of_its_layers(seed):
    """Of two or three drawn sources, in one engine, those that it receives alone."""
    model, rng = shared_model(), np.random.default_rng(seed)
    names = rng.permutation(sorted(READERS))[: 2 + seed]
    sources = {str(name): READERS[name](model) for name in names}
    wanted, (requests, texts) = {}, among_others("hot", Speculation("own"))
    for name in sources:
        alone = READERS[name](model)
        wanted[name] = states_read(alone)
        engine_for(model, 400, {"own": alone}).run_many(requests)
    merged = MergedDrafter([SuffixDrafter(), *sources.values()])
    found = {name: states_read(source) for name, source in sources.items()}
    answers = engine_for(model, 400, {"own": merged}).run_many(requests)
    assert [answer.tokens.tolist() for answer in answers] == texts
    assert sum(answer.counts.num_accepted_tokens for answer in answers) > 20
    for name in sources:
        both = found[name].keys() & wanted[name].keys()
        assert len(both) > 80
        for key in both:
            torch.testing.assert_close(found[name][key], wanted[name][key], rtol=1e-4, atol=1e-4)
    assert_forgotten(merged)
