"""Which strategies a captured search computes, and what happens if one fails."""

from dataclasses import replace

import pytest
import torch

from recserve.engine.beam_search_graph import BeamSearchGraph
from recserve.engine.scheduler import Scheduler
from recserve.models.item_heads import DraftPlan
from recserve.search.strategies.beam import BeamStrategy
from recserve.search.strategies.nezha import NezhaStrategy
from recserve.search.strategies.speculative import SpeculativeStrategy
from recserve.search.strategy import strategy_classes
from tests.support.device_worlds import recommending
from tests.support.recorded_searches import SOME, assert_same, with_searches

OWN = {"beam": BeamStrategy, "nezha": NezhaStrategy, "speculative": SpeculativeStrategy}


@pytest.fixture
def world(force_kernels):
    force_kernels("torch")
    world = recommending("cpu")
    with torch.inference_mode():
        graphs = with_searches(world, world.trie, lambda step: step, SOME)
    return world, graphs


def built(world, strategy):
    """Returns an instance of a strategy's class for the models of the engine."""
    own, model = world.engine._strategies[strategy], world.model
    more = {"nezha": (), "beam": (), "speculative": (DraftPlan(0, 0, 0, 0),)}[strategy]
    head = () if strategy == "beam" else (own.head,)

    class Derived(OWN[strategy]):
        """Searches in a way of its own."""

        started = 0

        def start(self, sequences):
            self.started += len(sequences)
            return super().start(sequences)

    class DerivedAgain(Derived):
        """Changes nothing."""

    class Declared(Derived):
        """Says that the captured search is its own."""

        captured_search = OWN[strategy].captured_search

    return [kind(model, *head, *more) for kind in (Derived, DerivedAgain, Declared)]


@pytest.mark.parametrize("strategy", OWN)
def test_a_derived_strategy_searches_in_its_own_way(strategy, world):
    """Only a class that names a captured search is replayed: its parents' one may be another."""
    world, graphs = world
    wanted = world.engine.run_many(world.ask("nezha" if strategy == "nezha" else "beam"))
    for number, derived in enumerate(built(world, strategy)):
        world.engine.forget_all()  # a cached draft is launched
        world.engine.add_strategy("derived", derived)
        before = graphs.counts["replayed"]
        requests = [replace(request, strategy="derived") for request in world.ask("beam")]
        assert_same(wanted, world.engine.run_many(requests))
        assert derived.started == (0 if number == 2 else 2)
        assert graphs.counts["replayed"] - before == (number == 2)


def test_the_strategies_of_this_package_name_their_captured_search():
    captured = {name: cls.captured_search for name, cls in strategy_classes().items()}
    assert {name for name, search in captured.items() if search} == set(OWN)


def refusing(monkeypatch, width, calls=None):
    """Makes replays of requests with a beam width fail."""
    load = BeamSearchGraph.load

    def refused(graph, search, part):
        if calls is not None:
            calls.append((graph.bucket.strategy, len(search.requests)))
        if any(request.width == width for request in search.requests[part]):
            raise RuntimeError("broken graph")
        load(graph, search, part)

    monkeypatch.setattr(BeamSearchGraph, "load", refused)


@pytest.mark.parametrize("strategy", ["beam", "nezha"])
@pytest.mark.parametrize("place", [0, 3, 5])
def test_a_replay_that_fails_holds_back_no_other_batch(strategy, place, world, monkeypatch):
    """Six requests in graphs of four, one breaks its replay; two of another strategy."""
    world, graphs = world
    other = "nezha" if strategy == "beam" else "beam"
    events = (1, 2, 3, 4, 5, 6)
    requests, neighbours = world.ask(strategy, events=events), world.ask(other)
    requests[place] = replace(requests[place], beam_width=7)
    wanted = world.engine.run_many([*requests, *neighbours])
    world.engine.forget_all()
    isolated, calls = [], []
    monkeypatch.setattr(Scheduler, "_isolate", lambda self, error: isolated.append(error))
    refusing(monkeypatch, 7, calls)
    before = graphs.counts["replayed"]
    futures = [world.engine.submit(request) for request in (*requests, *neighbours)]
    for _ in range(40):
        world.engine.step()
    assert not isolated and all(future.done() for future in futures)
    assert str(futures[place].exception(0)) == "broken graph"
    rest = [number for number in range(len(futures)) if number != place]
    assert_same([wanted[n] for n in rest], [futures[n].result(0) for n in rest])
    assert graphs.counts["replayed"] == before + 6  # five alone, and the neighbours together
    assert calls.count((other, 2)) == 1
    for number in rest:
        got, expected = futures[number].result(0), wanted[number]
        assert got.rounds == expected.rounds and got.timing.nodes == expected.timing.nodes
    kv = world.engine.schedulers["recommender"].kv
    assert kv.allocator.num_free + kv.prefixes.num_pages == kv.allocator.num_pages
