"""SystemExit and its like, at every place where the engine calls code of others."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from recserve.core.plugins import PluginExit
from recserve.core.request import SlateQuery
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams, Speculation
from recserve.speculation.verifiers.registry import verifiers
from tests.support.plugin_classes import LastToken, OtherRule, OtherStrategy
from tests.support.recommenders import CATALOGUES, draw_prefix, make
from tests.support.text_engines import assert_no_leak, engine_for, prompts
from tests.support.text_plain import drawn_model

EXITS = (SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, BaseException)


def leave(kind):
    """Returns a method that raises an exception of this kind."""

    def method(*arguments, **options):
        raise kind("leaves")

    return method


def outcomes(engine, queries, callback=None):
    """Submits queries to an engine with a thread of its own; returns results or errors."""

    def submit(query):
        try:
            return engine.submit(query)
        except PluginExit as error:
            return error

    engine.start()
    # A server submits on a thread too. On the main thread, KeyboardInterrupt is the user's.
    with engine.held(), ThreadPoolExecutor(1) as thread:
        futures = list(thread.map(submit, queries))
        if callback is not None:
            futures[0].add_done_callback(callback)
    found = [f if isinstance(f, PluginExit) else f.exception(60) or f.result(0) for f in futures]
    assert engine.alive, engine.stopped_by
    engine.close()
    return found


def texts():
    plain = Speculation("none", num_tokens=1)
    return [
        TextQuery(prompt[: 4 + number], SamplingParams(seed=number, max_tokens=6), plain)
        for number, prompt in enumerate(prompts(3, low=9, high=15))
    ]


# What the request comes to whose code leaves: its error, or its result where that was ready.
DRAFTER = {"read": True, "propose": True, "commit": True, "forget": False}
TEXT = {
    **{f"drafter.{hook}": fails for hook, fails in DRAFTER.items()},
    "rule.check": True,
    "rule.verify": True,
    "listener": True,
    "callback": False,
}


@pytest.mark.parametrize("hook", TEXT)
@pytest.mark.parametrize("kind", EXITS)
def test_code_of_a_text_that_leaves_fails_its_text_alone(hook, kind, monkeypatch):
    model, queries = drawn_model(1), texts()
    expected = [one.tokens.tolist() for one in outcomes(engine_for(model), queries)]
    drafter, rule = LastToken(), OtherRule()
    part, _, name = hook.partition(".")
    if name:
        target = drafter if part == "drafter" else rule
        monkeypatch.setattr(target, name, leave(kind), raising=True)
    monkeypatch.setitem(verifiers(), "other", rule)
    wrong = replace(queries[0], speculation=Speculation("quiet", "other", num_tokens=1))
    if hook == "listener":
        wrong = replace(wrong, on_commit=leave(kind))
    engine = engine_for(model, drafters={"quiet": drafter})
    found = outcomes(engine, [wrong, *queries[1:]], leave(kind) if hook == "callback" else None)
    if TEXT[hook]:
        assert isinstance(found[0], PluginExit)
        assert f"{__name__}.leave" in str(found[0]) and kind.__name__ in str(found[0])
    else:
        assert found[0].tokens.tolist()
    assert [one.tokens.tolist() for one in found[1:]] == expected[1:]
    assert_no_leak(engine)


@pytest.mark.parametrize(
    "hook", ["tree_capacity", "start", "is_finished", "propose", "verify", "finish", "callback"]
)
@pytest.mark.parametrize("kind", EXITS)
def test_a_strategy_that_leaves_fails_its_request_alone(hook, kind, monkeypatch):
    model, trie = make(CATALOGUES["ordinary"], "codes", "children")
    queries = [
        SlateQuery(prefix=draw_prefix(model, 4 + i, i), trie=trie, k=3, beam_width=3)
        for i in range(3)
    ]

    def engine_with(strategy):
        engine = build_engine(EngineModels(model), EngineConfig(kv_bytes=4 * 2**20))
        engine.add_strategy("other", strategy)
        return engine

    expected = [one.rows.tolist() for one in outcomes(engine_with(OtherStrategy(model)), queries)]
    strategy = OtherStrategy(model)
    if hook != "callback":
        monkeypatch.setattr(strategy, hook, leave(kind))
    wrong = [replace(queries[0], strategy="other"), *queries[1:]]
    callback = leave(kind) if hook == "callback" else None
    found = outcomes(engine_with(strategy), wrong, callback)
    if hook == "callback":
        assert found[0].rows.tolist() == expected[0]
    else:
        assert isinstance(found[0], PluginExit) and f"{__name__}.leave" in str(found[0])
    assert [one.rows.tolist() for one in found[1:]] == expected[1:]
