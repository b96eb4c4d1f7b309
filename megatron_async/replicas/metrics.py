"""One metrics page over all replicas: what each has counted, labelled with its name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from megatron_async.serving.front_end.metrics import PREFIX, EngineCollector
from megatron_async.serving.messages import Snapshot


class Replicas(Protocol):
    """What is needed of ``ReplicasClient``."""

    retried: int

    @property
    def snapshots(self) -> Mapping[str, Snapshot]:
        """The last of each replica, by name."""

    @property
    def states(self) -> Mapping[str, bool]:
        """Whether each replica serves, by name."""


class ReplicasCollector:
    """The values of ``EngineCollector`` for each replica, with the label ``replica``; sum them to
    get those of the server. A replica that has left is not there any more."""

    def __init__(self, model_name: str, replicas: Replicas) -> None:
        self._model_name = model_name
        self._replicas = replicas

    def describe(self) -> list[Metric]:
        """Nothing, so that registering asks for no snapshot."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All values of all snapshots."""
        states, snapshots = self._replicas.states, self._replicas.snapshots
        families: dict[str, Metric] = {}
        for name, is_ready in states.items():
            for metric in self._of(snapshots.get(name), is_ready):
                empty = Metric(metric.name, metric.documentation, metric.type)
                family = families.setdefault(metric.name, empty)
                for sample in metric.samples:
                    labelled = {**sample.labels, "replica": name}
                    family.samples.append(sample._replace(labels=labelled))
        yield from families.values()
        labels = ["model_name"]
        ready = GaugeMetricFamily(f"{PREFIX}_replicas_ready", "Replicas that serve", labels=labels)
        ready.add_metric([self._model_name], sum(states.values()))
        yield ready
        said = "Requests that were tried again because their replica had died"
        retried = CounterMetricFamily(f"{PREFIX}_requests_retried", said, labels=labels)
        retried.add_metric([self._model_name], self._replicas.retried)
        yield retried

    def _of(self, snapshot: Snapshot | None, is_ready: bool) -> Iterator[Metric]:
        return EngineCollector(self._model_name, lambda: snapshot, lambda: is_ready).collect()
