"""A request that is cancelled while its step's requests are tried alone holds up none of them."""

import pytest

from recserve.engine.runner import Runner
from recserve.speculation.completion import TextQuery
from recserve.speculation.sampling_params import SamplingParams
from tests.support.grids import covering
from tests.support.text_engines import assert_no_leak, engine_for, prompts
from tests.support.text_plain import drawn_model

TEXTS = 4


@pytest.mark.parametrize("tried,gone", covering(range(TEXTS + 1), range(TEXTS)))
def test_the_others_go_on_together(monkeypatch, gone, tried):
    """The first step fails, `tried` of its texts are tried alone, and then one is cancelled."""
    params = SamplingParams(temperature=0.0, max_tokens=12)
    queries = [TextQuery(prompt, params) for prompt in prompts(TEXTS, low=3, high=9)]
    engine = engine_for(drawn_model(1))
    expected = [engine.run(query).tokens.tolist() for query in queries]
    engine.forget_all()
    forward, together = Runner.forward, []

    def broken(self, pieces, aux_states=None):
        together.append(engine.schedulers["text"].num_admitted)
        if len(together) == 1:
            raise RuntimeError("broken kernel")
        return forward(self, pieces, aux_states)

    monkeypatch.setattr(Runner, "forward", broken)
    futures = [engine.submit(query) for query in queries]
    for _ in range(1 + tried):
        engine.step()
    futures[gone].cancel()
    while engine.step():
        pass
    assert together[0] == TEXTS and futures[gone].cancelled()
    for number, future in enumerate(futures):
        if number != gone:
            assert future.result(0).tokens.tolist() == expected[number]
    after = together[1 + tried :]
    assert after.count(TEXTS - 1) > 5, "the others step together until they end"
    if tried == TEXTS:
        assert after[0] == TEXTS - 1, "at once, when all have been tried"
    assert_no_leak(engine)
