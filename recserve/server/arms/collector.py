"""Prometheus metrics of experiments, read at scrape time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from recserve.experiments.serving.registry import Experiments

COUNTS = (
    ("requests", "Requests of an arm of an experiment"),
    ("errors", "Requests of an arm that failed on the server's side"),
    ("empty", "Answers of an arm without an item from a model or without a token"),
)
COMPARISONS = (
    ("answers", "Requests that both arms answered"),
    ("shared", "Sum over these of the share of the control's items that the other arm has"),
    ("identical", "Requests with the same items in the same order in both arms"),
    ("dropped", "Copies dropped because the server was busy, and pairs cut by the deadline"),
)


class ExperimentCollector(Collector):
    """Exports the state of the experiments. Label values come from the configuration."""

    def __init__(self, experiments: Experiments) -> None:
        self.experiments = experiments

    def describe(self) -> Iterable[Metric]:
        """Returns nothing: the metrics depend on the configuration."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics; none without experiments."""
        found = list(self.experiments)
        if not found:
            return
        for name, text in COUNTS:
            family = CounterMetricFamily(f"recserve_experiment_{name}", text, labels=["arm"])
            for one in found:
                for arm in one.arms:
                    family.add_metric([arm.label], getattr(arm.tally, name))
            yield family
        forwarded = CounterMetricFamily(
            "recserve_experiment_forwarded",
            "Requests for the other server of an arm by what became of them",
            labels=["arm", "result"],
        )
        for arm in (arm for one in found for arm in one.arms if arm.remote):
            for result, count in arm.forwarded.items():
                forwarded.add_metric([arm.label, result], count)
        yield forwarded
        running = GaugeMetricFamily(
            "recserve_experiment_running", "1 while the experiment runs", labels=["experiment"]
        )
        fallbacks = CounterMetricFamily(
            "recserve_experiment_fallbacks",
            "Automatic fall-backs to the control, by the guard that decided",
            labels=["experiment", "reason"],
        )
        for one in found:
            running.add_metric([one.settings.name], one.status == "running")
            for cause, count in one.fallbacks.items():
                fallbacks.add_metric([one.settings.name, cause], count)
        for name, text in COMPARISONS:
            family = CounterMetricFamily(
                f"recserve_experiment_compared_{name}", text, labels=["experiment"]
            )
            for one in found:
                family.add_metric([one.settings.name], getattr(one.compared, name))
            yield family
        yield running
        yield fallbacks
