"""Serves the run's status to Prometheus, on an optional port of the loopback interface."""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from buffers.run_status import RunStatus


class Metrics:
    """Serves the newest status to Prometheus. Without a port it does nothing."""

    def __init__(self, port: int | None) -> None:
        """Raises ValueError when the port is taken."""
        self._status: RunStatus | None = None
        self._server = None
        if port is None:
            return
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, addr="127.0.0.1", registry=registry)
        except OSError as error:
            raise ValueError(f"buffer.metrics_port must be free, got {port}: {error.strerror}") from error

    @property
    def is_served(self) -> bool:
        return self._server is not None

    def update(self, status: RunStatus) -> None:
        self._status = status

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics. Prometheus's client calls this from a thread of its own."""
        if self._status is not None:
            yield from make_families(self._status)


def make_families(status: RunStatus) -> Iterator[Metric]:
    """Yields the metrics of a status. `docs/metrics.md` says what each means."""
    for name, (text, value) in _list_gauges(status).items():
        yield GaugeMetricFamily(name, text, value=value)
    for unit, account in (("tokens", status.tokens), ("groups", status.groups)):
        fates = {
            "trained": account.trained,
            "masked": account.masked,
            "in_flight": account.in_flight,
            **account.rejected,
        }
        text = f"The ledger, in {unit}, by fate"
        yield _label_gauge(f"slipstream_ledger_{unit}", text, "fate", fates)
    histogram = {str(versions): tokens for versions, tokens in status.staleness_histogram.items()}
    yield _label_gauge("slipstream_trained_tokens", "Trained tokens by staleness", "staleness", histogram)
    refused = CounterMetricFamily(
        "slipstream_refused_messages", "Messages refused, by reason", labels=["reason"]
    )
    for reason, amount in status.refused_requests.items():
        refused.add_metric([reason], amount)
    yield refused
    for fate in ("leased", "trained", "rejected"):
        groups = {name: getattr(report, fate) for name, report in status.sources.items()}
        yield _label_gauge(f"slipstream_source_groups_{fate}", f"Groups {fate}, by source", "source", groups)
    yield _label_gauge("slipstream_curriculum", "Figures of the curriculum", "figure", status.curriculum)
    versions = {name: report.version for name, report in status.generators.items()}
    text = "Version that a generator holds"
    yield _label_gauge("slipstream_generator_version", text, "generator", versions)
    last_heard = {name: role.last_heard_s for name, role in status.roles.items()}
    text = "Since a role's last heartbeat"
    yield _label_gauge("slipstream_role_last_heard_seconds", text, "role", last_heard)


def _list_gauges(status: RunStatus) -> dict[str, tuple[str, float]]:
    """Returns (help, value) of each metric without labels, by name."""
    return {
        "slipstream_version": ("Newest published version", status.version),
        "slipstream_steps_trained": ("Steps trained", status.num_trained_steps),
        "slipstream_standstill_seconds": ("Seconds since data last moved", status.standstill_s),
        "slipstream_learner_idle_ratio": (
            "Share of its life that the learner waited",
            status.learner_idle_share,
        ),
        "slipstream_generators_idle_ratio": (
            "Share of their lives that engines had nothing to do",
            status.generator_idle_share,
        ),
        "slipstream_groups_quarantined": ("Groups that failed for good", status.num_quarantined),
        "slipstream_tokens_replayed": (
            "Tokens trained again, beyond their first time",
            status.replayed_tokens,
        ),
        "slipstream_weight_digest_checks": ("Comparisons of weights with a manifest", status.digest_checks),
        "slipstream_weight_fetched_bytes": (
            "Bytes of weights that came over a network",
            status.fetched_bytes,
        ),
        "slipstream_scores_abandoned": ("Scores that hung and were given up", status.abandoned_scores),
        "slipstream_tokens_discarded": (
            "Sampled tokens behind a stop string, or of a request that was withdrawn",
            status.discarded_tokens,
        ),
        "slipstream_weight_digest_mismatches": (
            "Weight updates that did not verify",
            status.digest_mismatches,
        ),
    }


def _label_gauge(name: str, text: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    """Returns a gauge with a value for each value of its label."""
    gauge = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        gauge.add_metric([key], value)
    return gauge
