"""The times between the pieces of texts, by a clock of our own."""

from types import SimpleNamespace

import numpy as np
import pytest

from recserve.server import piece_clock
from recserve.server.piece_clock import StreamLatency
from recserve.service.text.stream import Piece


class Times(list):
    """A histogram that holds what it observes."""

    observe = list.append


def measure(monkeypatch, began_s, pieces):
    """Returns the three histograms after pieces at their times."""
    metrics = SimpleNamespace(first_token=Times(), inter_token=Times(), token_seconds=Times())
    latency = StreamLatency(metrics, began_s)
    for at_s, piece in pieces:
        clock = SimpleNamespace(monotonic=lambda at_s=at_s: at_s)
        monkeypatch.setattr(piece_clock, "time", clock)
        latency.take(piece)
    latency.close()
    return metrics.first_token, metrics.inter_token, metrics.token_seconds


@pytest.mark.parametrize("seed", range(10))
def test_times_of_texts_are_those_of_plain_loops(monkeypatch, seed):
    """Texts whose pieces come in any order; a piece may bring no tokens."""
    drawn = np.random.default_rng(seed)
    count = int(drawn.integers(1, 4))
    tokens, pieces, texts = [0] * count, [], [[] for _ in range(count)]
    for number in range(int(drawn.integers(1, 25))):
        index, at_s = int(drawn.integers(count)), 10.0 + 0.5 * number
        tokens[index] += int(drawn.integers(0, 4))
        pieces.append((at_s, Piece(index, num_tokens=tokens[index])))
        if not texts[index] or tokens[index] > texts[index][-1][1]:
            texts[index].append((at_s, tokens[index]))
    first, between, means = measure(monkeypatch, 9.0, pieces)
    assert first == [texts[0][0][0] - 9.0] if texts[0] else first == []
    assert sorted(between) == sorted(
        later - at_s
        for text in texts
        for (at_s, _), (later, _) in zip(text, text[1:], strict=False)
    )
    wanted = [
        (text[-1][0] - text[0][0]) / (text[-1][1] - text[0][1]) for text in texts if len(text) > 1
    ]
    assert sorted(means) == pytest.approx(sorted(wanted))


def test_a_text_that_fails_at_once_has_no_first_token(monkeypatch):
    failed = Piece(0, error=ValueError("no"))
    assert measure(monkeypatch, 9.0, [(10.0, failed)]) == ([], [], [])
