"""What the webhook tells Prometheus.

Labels come from a closed set or from policies that exist, never from what a request says. The registry is the
process's own, so that several can live in one test process.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sluicegate_operator.webhook.decide import Outcome
from sluicegate_operator.webhook.tls import ServingCertificate
from sluicegate_operator.webhook.watch import Policies

#: An injection takes a millisecond or a few; the API server gives up at five seconds.
SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

#: Requests that got no answer as an AdmissionReview, by why.
NO_ANSWER: Final = ("bad_request", "busy", "late", "policy_unknown", "failed")


class WebhookMetrics:
    """The metrics of one process, and what collects them."""

    def __init__(self, policies: Policies, certificate: ServingCertificate) -> None:
        self.registry = CollectorRegistry()
        self.reviews = Counter(
            "sluicegate_webhook_reviews",
            "Answered creations of pods, by what became of them and by the policy whose entry fired.",
            ("outcome", "namespace", "policy"),
            registry=self.registry,
        )
        self.errors = Counter(
            "sluicegate_webhook_errors",
            "Requests that got an error instead of an answer: the API server acts by the entry's failurePolicy.",
            ("reason",),
            registry=self.registry,
        )
        for reason in NO_ANSWER:
            self.errors.labels(reason)
        self.seconds = Histogram(
            "sluicegate_webhook_review_seconds",
            "From the request to the answer.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.in_flight = 0
        self.registry.register(_State(self, policies, certificate))

    def decided(self, outcome: Outcome, policy: str) -> None:
        """Count an answer. `policy` is `namespace/name` of one that is known, or empty."""
        namespace, _, name = policy.partition("/")
        self.reviews.labels(outcome.value, namespace, name).inc()


class _State(Collector):
    """What is there when it is asked for."""

    def __init__(self, metrics: WebhookMetrics, policies: Policies, certificate: ServingCertificate) -> None:
        self._metrics = metrics
        self._policies = policies
        self._certificate = certificate

    def collect(self) -> Iterator[Metric]:
        yield _gauge("sluicegate_webhook_in_flight", "Requests being answered.", self._metrics.in_flight)
        policies, certificate = self._policies, self._certificate
        yield _gauge("sluicegate_webhook_policies", "Policies known.", len(policies))
        synced = "1 once all policies have been listed."
        yield _gauge("sluicegate_webhook_synced", synced, int(policies.synced))
        if policies.last_heard is not None:
            heard = "Since the API server last said something about policies; bookmarks come each minute."
            yield _gauge("sluicegate_webhook_policies_age_seconds", heard, monotonic() - policies.last_heard)
        failures = CounterMetricFamily(
            "sluicegate_webhook_api_failures",
            "Calls of the API server that came to nothing.",
            labels=("call",),
        )
        for call, count in policies.failures.items():
            failures.add_metric((call,), count)
        yield failures
        if certificate.loaded is not None:
            ends = "When the certificate that is served ends."
            name = "sluicegate_webhook_certificate_expiry_timestamp_seconds"
            yield _gauge(name, ends, certificate.loaded.ends.timestamp())
        reloads = CounterMetricFamily(
            "sluicegate_webhook_certificate_reloads",
            "Changed certificate files, by result.",
            labels=("result",),
        )
        for result, count in certificate.reloads.items():
            reloads.add_metric((result,), count)
        yield reloads


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value)
