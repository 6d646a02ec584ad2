"""The engines of the benchmark's checks capture no CUDA graphs: the checks have no time for it."""

import pytest

from benchmarks.gpu import engine as checks
from recserve.engine import beam_search_graph, capture, text_step_graph


@pytest.mark.parametrize(
    "name",
    ["text none, sample, everything", "strategy text_scores", "strategy beam of codes"],
)
def test_checks_capture_nothing(name, monkeypatch):
    def recorder():
        raise AssertionError("a check captures CUDA graphs")

    for module in (capture, text_step_graph, beam_search_graph):
        monkeypatch.setattr(module, "is_cuda", lambda device: True)
        monkeypatch.setattr(module, "CudaRecorder", recorder)
    tasks = {task.name: task for task in checks.engine_checks("cpu", smoke=True)}
    check = tasks[f"{name}: as on the CPU"].checked()
    assert check.ok, check
