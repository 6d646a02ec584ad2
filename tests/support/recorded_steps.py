"""Engines with captured text steps, over a pool filled with poison values."""

import torch

from recserve.engine.text_scheduler import TextScheduler
from recserve.engine.text_step_graph import StepShape, TextStepGraphs, TextStepLimits
from tests.support import recorder
from tests.support.text_engines import engine_for

POISON = 1e4


SHAPES = (StepShape(2, 1, 0), StepShape(16, 1, 8), StepShape(24, 8, 4), StepShape(64, 8, 12))


class Counted(recorder.CpuRecorder):
    """Captures steps and counts their replays."""

    replays = 0

    def __call__(self, step):
        replay = self.capture(step)

        def counted():
            self.replays += 1
            return replay()

        return counted


def with_graphs(model, counted, shapes=SHAPES, pages=200, drafters=None, **limits):
    """Returns an engine whose text scheduler replays, over a pool filled with poison values."""
    engine = engine_for(model, pages, drafters)
    lane = engine.schedulers["text"]
    with torch.inference_mode():
        bounds = TextStepLimits(shapes, **{"seconds": float("inf"), **limits})
        graphs = TextStepGraphs(lane.runner, lane.kv, model, bounds, counted, drafters)
        lane.runner.pool.keys.fill_(POISON)
        lane.runner.pool.values.fill_(POISON)
    engine.schedulers["text"] = TextScheduler(lane.runner, model, lane.limits, graphs, kv=lane.kv)
    return engine
