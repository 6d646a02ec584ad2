"""A plug-in that hangs in a step: the engine closes, its requests fail, and the process ends."""

import random
import subprocess
import sys
import threading

import pytest

from recserve.core.errors import EngineStopped
from recserve.core.request import SlateQuery
from recserve.engine import engine as engine_module
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams, Speculation
from recserve.speculation.verifiers.registry import verifiers
from tests.support.plugin_classes import LastToken, OtherRule, OtherStrategy
from tests.support.recommenders import CATALOGUES, draw_prefix, make
from tests.support.text_engines import engine_for, prompts
from tests.support.text_plain import drawn_model

HOOKS = {
    "drafter": ("read", "propose", "commit", "forget"),
    "rule": ("verify",),
    "strategy": ("tree_capacity", "start", "is_finished", "propose", "verify", "finish"),
}


class Gate:
    """Where a plug-in hangs: at call number `number` in a step, until `opened` is set."""

    def __init__(self, number=1):
        self.left, self.reached, self.opened = number, threading.Event(), threading.Event()

    def before(self, method):
        """Returns a method that hangs here before it does what it did."""

        def call(*arguments, **options):
            self.left -= threading.current_thread().name == "engine"
            if self.left == 0 and not self.reached.is_set():
                self.reached.set()
                self.opened.wait(120)
            return method(*arguments, **options)

        return call


def build(part):
    """Returns an engine with the plug-in of this kind, some requests of it, and the plug-in.

    At most two of the requests run at once.
    """
    number = random.randrange(1, 6)
    if part == "strategy":
        model, trie = make(CATALOGUES["ordinary"], "codes", "children")
        engine = build_engine(EngineModels(model), EngineConfig(kv_bytes=4 * 2**20, max_running=2))
        plugin = OtherStrategy(model)
        engine.add_strategy("other", plugin)
        prefixes = [draw_prefix(model, 4 + i, i) for i in range(number)]
        queries = [
            SlateQuery(prefix=prefix, trie=trie, k=3, beam_width=3, strategy="other")
            for prefix in prefixes
        ]
        return engine, queries, plugin
    drafter, rule = LastToken(), OtherRule()
    verifiers()["other"] = rule
    engine = engine_for(drawn_model(1), drafters={"last": drafter}, max_running=2)
    speculation = Speculation("last", "other", num_tokens=1)
    queries = [
        TextQuery(prompt, SamplingParams(seed=i, max_tokens=6), speculation)
        for i, prompt in enumerate(prompts(number, low=4, high=15))
    ]
    return engine, queries, drafter if part == "drafter" else rule


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    monkeypatch.setitem(verifiers(), "other", None)  # removed again at the end


def run_on_thread(function):
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("hook", [f"{part}.{name}" for part in HOOKS for name in HOOKS[part]])
def test_an_engine_closes_although_a_plugin_hangs(hook, monkeypatch):
    """Each request ends with a result or EngineStopped, and keeps it when the step goes on."""
    part, _, name = hook.partition(".")
    engine, queries, plugin = build(part)
    gate = Gate(random.randrange(1, 3) if len(queries) > 2 else 1)
    monkeypatch.setattr(plugin, name, gate.before(getattr(plugin, name)))
    monkeypatch.setattr(engine_module, "CLOSE_S", 0.05)
    with engine.held():
        engine.start()
        futures = [engine.submit(query) for query in queries]
    assert gate.reached.wait(60)
    thread = engine._thread
    run_on_thread(engine.close)
    assert thread.is_alive() and not engine.alive
    errors = [future.exception(0) for future in futures]
    assert any(errors) or name in ("forget", "finish")
    assert all(error is None or isinstance(error, EngineStopped) for error in errors)
    if name == "propose":
        assert all(errors)
    gate.opened.set()
    thread.join(60)
    assert not thread.is_alive()
    assert [future.exception(0) for future in futures] == errors
    if hook == "drafter.propose":  # no request has ended, and none goes on
        assert engine.schedulers["text"].num_running
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit(queries[0])


@pytest.mark.parametrize("part", HOOKS)
def test_an_engine_that_closes_finishes_its_requests(part, monkeypatch):
    """Although the steps together take longer than the limit of one."""
    engine, queries, plugin = build(part)
    expected = [engine.run(query) for query in queries]
    slept = threading.Event()
    name = "propose" if part != "rule" else "verify"
    method = getattr(plugin, name)

    def slow(*arguments, **options):
        slept.wait(0.02)
        return method(*arguments, **options)

    monkeypatch.setattr(plugin, name, slow)
    with engine.held():
        futures = [engine.submit(query) for query in queries]
        engine.start()
    engine.close()
    names = ("rows",) if part == "strategy" else ("tokens",)
    for future, result in zip(futures, expected, strict=True):
        for field in names:
            assert getattr(future.result(0), field).tolist() == getattr(result, field).tolist()
    assert engine.stopped_by is None


HANGING = """
import threading
from recserve.engine import engine as engine_module
from tests.engine import test_plugin_hangs as plugins

engine_module.CLOSE_S = 0.05
engine, queries, drafter = plugins.build("drafter")
gate = plugins.Gate()
drafter.propose = gate.before(drafter.propose)
engine.start()
engine.submit(queries[0])
assert gate.reached.wait(60)
engine.close()
"""


def test_a_process_ends_although_a_plugin_hangs():
    command = [sys.executable, "-c", HANGING]
    assert subprocess.run(command, timeout=120, check=False).returncode == 0
