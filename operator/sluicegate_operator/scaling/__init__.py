"""The second clock: from what the gates report to the number of replicas that is needed.

    report         what one gate says, read and checked
    pods           the cluster's pods as replicas, and whose they are
    ledger         successive reports of all gates of a policy, added up over time
    demand         the number of replicas that follows from that: a pure function
    board          the last answer for each policy, and how old it is
    endpoint       the answer as JSON, for KEDA's `metrics-api` trigger
    metrics        the board in Prometheus' words
    scaled_object  the ScaledObject that makes KEDA ask

One rule runs through all of it: what is not known is said to be unknown, with the reason. An autoscaler holds
the replicas that it has when it gets no number, and takes some away when it gets a low one.

`demand` knows neither KEDA nor HTTP: an HPA without KEDA (external metrics) and a status condition read the same
answer off the board.
"""

from sluicegate_operator.scaling.board import Board, PolicyKey
from sluicegate_operator.scaling.demand import Bounds, Demand, Unknown, Why
from sluicegate_operator.scaling.endpoint import scaling_app
from sluicegate_operator.scaling.ledger import Replica, ReplicaState
from sluicegate_operator.scaling.metrics import BoardCollector
from sluicegate_operator.scaling.report import GateReport, ReportError, parse_report
from sluicegate_operator.scaling.scaled_object import ScaledObjectSpec, ScaleTarget, scaled_object

__all__ = [
    "Board",
    "BoardCollector",
    "Bounds",
    "Demand",
    "GateReport",
    "PolicyKey",
    "Replica",
    "ReplicaState",
    "ReportError",
    "ScaleTarget",
    "ScaledObjectSpec",
    "Unknown",
    "Why",
    "parse_report",
    "scaled_object",
    "scaling_app",
]
