"""The tree of an explanation: the prefixes that the search scored, and how they came into it."""

import pytest
from msgspec import structs

from recserve.models.item_heads import DraftPlan
from recserve.schemas.items import RecommendRequest, UserRef
from recserve.search.strategies import slate_trees


def ask(service, strategy, **more):
    user = UserRef(id=service.samples(3, 1)["users"][2])
    return RecommendRequest(user=user, strategy=strategy, beam_width=20, **more)


def path_sum(tree, node):
    total = 0.0
    while node is not None:
        total += node.log_prob
        node = None if node.parent is None else tree[node.parent]
    return total


def path_codes(tree, node):
    codes = []
    while node is not None:
        codes.insert(0, node.code)
        node = None if node.parent is None else tree[node.parent]
    return codes


def check_shape(answer):
    """Parents come first, levels count from the root, leaves are the slate's items."""
    tree = answer.explanation.tree
    for index, node in enumerate(tree):
        assert node.parent is None if node.level == 0 else 0 <= node.parent < index
        assert node.level == 0 or tree[node.parent].level == node.level - 1
        assert (node.round > 0) == (node.origin != "unscored")
    leaves = {node.rank: node for node in tree if node.rank is not None}
    ranked = [item for item in answer.items if item.source == "model"]
    assert sorted(leaves) == [item.rank for item in ranked]
    for item in ranked:
        assert path_codes(tree, leaves[item.rank]) == item.semantic_id
    return leaves


@pytest.mark.parametrize("strategy", ["beam", "speculative", "nezha"])
def test_the_tree_holds_the_slate_and_the_slate_is_the_same(service, strategy):
    service.recommend(ask(service, strategy))
    plain = service.recommend(ask(service, strategy))
    answer = service.recommend(ask(service, strategy, explain=True))
    check_shape(answer)
    assert [i.item_id for i in answer.items] == [i.item_id for i in plain.items]
    assert [i.score for i in answer.items] == pytest.approx([i.score for i in plain.items])


@pytest.mark.parametrize("strategy", ["beam", "speculative"])
def test_log_probabilities_on_a_path_add_up_to_the_score(service, strategy):
    answer = service.recommend(ask(service, strategy, explain=True, dense_weight=0.0))
    leaves = check_shape(answer)
    for item in answer.items:
        assert path_sum(answer.explanation.tree, leaves[item.rank]) == pytest.approx(
            item.score, abs=1e-4
        )


def test_scored_prefixes_are_the_nodes_of_the_forward_passes(service):
    answer = service.recommend(ask(service, "beam", explain=True))
    scored = [node for node in answer.explanation.tree if node.round]
    assert len(scored) == answer.explanation.nodes > 0
    assert {node.origin for node in scored} == {"search"}
    assert max(node.round for node in scored) == answer.rounds


def test_a_poor_draft_is_repaired(service):
    strategy = service.engine._strategies["speculative"]
    strategy.policy.only, strategy.caches = DraftPlan(0.1, 0.0, 0.0, 1.0), False
    answer = service.recommend(ask(service, "speculative", explain=True))
    check_shape(answer)
    rounds = {node.origin: set() for node in answer.explanation.tree}
    for node in answer.explanation.tree:
        rounds[node.origin].add(node.round)
    assert rounds["draft"] == {1}
    assert rounds["repair"] and min(rounds["repair"]) == 2
    beam = service.recommend(ask(service, "beam"))
    assert [i.item_id for i in answer.items] == [i.item_id for i in beam.items]


def test_the_next_request_drafts_what_proved_the_slate(service):
    first = service.recommend(ask(service, "speculative", explain=True))
    again = service.recommend(ask(service, "speculative", explain=True))
    assert again.rounds == 1 and again.explanation.nodes <= first.explanation.nodes
    assert {node.origin for node in again.explanation.tree} <= {"draft", "unscored"}


def test_a_large_tree_keeps_the_slate_and_the_likeliest_prefixes(service, monkeypatch):
    whole = service.recommend(ask(service, "beam", explain=True))
    monkeypatch.setattr(slate_trees, "MAX_NODES", 4)
    cut = service.recommend(ask(service, "beam", explain=True))
    check_shape(cut)
    assert cut.explanation.tree_omitted > 0
    assert len(cut.explanation.tree) + cut.explanation.tree_omitted == len(whole.explanation.tree)


def test_a_cold_user_has_an_empty_tree(service):
    answer = service.recommend(RecommendRequest(user=UserRef(id="nobody"), explain=True))
    assert answer.explanation.tree == [] and answer.explanation.tree_omitted == 0


def test_neighbours_in_a_batch_have_their_own_trees(service):
    users = service.samples(4, 1)["users"]
    asks = [
        structs.replace(ask(service, "beam", explain=True), user=UserRef(id=user)) for user in users
    ]
    alone = [service.recommend(one).explanation.tree for one in asks]
    together = [pending.wait() for pending in [service.recommender.begin(one) for one in asks]]
    for one, other in zip(alone, together, strict=True):
        nodes = [(n.parent, n.code, n.rank) for n in other.explanation.tree]
        assert nodes == [(n.parent, n.code, n.rank) for n in one]
