"""Made-up runs of an experiment: exchanges with drawn latencies, without a server."""

import numpy as np

from recserve.load.datasets import Sample
from recserve.load.generator import HttpExchange, Mode, Run
from recserve.load.measurements import SampleColumns
from recserve.load.targets import Reply

SLATE = tuple(f"item{n}" for n in range(10))
NEXT = (*SLATE, "elsewhere", "nowhere")
SAMPLES = tuple(Sample(unit=f"u{n}", next_item=NEXT[n % len(NEXT)]) for n in range(60))


def made_run(
    mode: Mode = "blocks",
    shots: int = 4000,
    effect: float = 0.0,
    changed: int = 0,
    failed: float = 0.0,
    text: bool = False,
    seed: int = 0,
) -> SampleColumns:
    """Two arms on the same waves.

    Args:
        mode: How arms are drawn.
        shots: Number of shots, 10 ms apart.
        effect: Of the treatment, relative.
        changed: Items of the treatment's slates that differ.
        failed: Share of the treatment's requests that fail.
        text: Whether answers are streams of text.
        seed: Of everything.
    """
    drawn = np.random.default_rng(seed)
    waves = np.repeat(drawn.normal(0, 0.3, shots // 40 + 1), 40)[:shots]
    exchanges = []
    for shot in range(shots):
        arms = drawn.permutation(2) if mode == "paired" else [shot // 2 % 2 ^ shot % 2]
        sample = int(drawn.integers(len(SAMPLES)))
        if mode == "split":
            arms = [sample % 2]
        start = shot / 100
        for place, arm in enumerate(arms):
            seconds = 0.01 * np.exp(waves[shot] + drawn.normal(0, 0.2)) * (1 + effect * arm)
            bad = arm == 1 and drawn.random() < failed
            exchanges.append(
                HttpExchange(
                    shot=shot,
                    place=place,
                    arm=int(arm),
                    sample=sample,
                    scheduled=start,
                    sent=start + 1e-4,
                    done=start + float(seconds),
                    status=503 if bad else 200,
                    error="http_503" if bad else None,
                    detail="queue full" if bad else "",
                    pieces=(start + float(seconds) / 4, start + float(seconds)) if text else (),
                    reply=None if bad else made_reply(int(arm), changed, text),
                )
            )
            start += float(seconds)
    run = Run(tuple(exchanges), seconds=shots / 100, cpu_seconds=0.1, peak_in_flight=3)
    return SampleColumns.of(run, SAMPLES)


def made_reply(arm: int, changed: int, text: bool) -> Reply:
    """A slate whose last items differ in the treatment, or a text of nine tokens in three steps."""
    if text:
        counts = {"num_drafts": 3, "num_draft_tokens": 9, "num_accepted_tokens": 6}
        return Reply(text="abc", output_tokens=9, prompt_tokens=5, **counts)
    other = tuple(f"other{n}" for n in range(changed)) if arm else ()
    return Reply(item_ids=SLATE[: 10 - len(other)] + other, server_ms=5.0, versions=("m1",))
