"""The webhook configuration: one entry a policy, nothing more, and nothing to write at rest."""

import copy
from typing import Any

import pytest

from sluicegate_core.policy import FailurePolicy, Selector
from sluicegate_operator.webhook_configuration import (
    INJECT_CA_FROM,
    MAX_ENTRIES,
    MAX_ENTRY_NAME,
    Entry,
    Target,
    build_configuration,
    ca_bundles,
    entry_name,
    entry_path,
    excluded,
    plan_configuration,
)

SELECTOR = Selector(match_labels=(("app", "llama"),))
TARGET = Target(
    namespace="sluicegate-system", service="sluicegate-webhook", ca_bundle="QUJD", labels={"a": "b"}
)
CERT_MANAGER = Target(
    namespace="sluicegate-system", service="sluicegate-webhook", inject_ca_from="sluicegate-system/webhook"
)
LLAMA = Entry(namespace="serving", name="llama", selector=SELECTOR)
MISTRAL = Entry(namespace="serving", name="mistral", selector=Selector(), failure_policy=FailurePolicy.FAIL)


def live(configuration: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    """As the API server gives it back: with what it adds."""
    there = copy.deepcopy(configuration)
    there["metadata"] |= {"uid": "u", "resourceVersion": "7", "generation": 2, "managedFields": []} | metadata
    return there


def test_an_entry_selects_exactly_the_policys_pods() -> None:
    (entry,) = build_configuration([LLAMA], TARGET)["webhooks"]
    assert entry == {
        "name": "llama.serving.inject.sluicegate.dev",
        "admissionReviewVersions": ["v1"],
        "clientConfig": {
            "caBundle": "QUJD",
            "service": {
                "name": "sluicegate-webhook",
                "namespace": "sluicegate-system",
                "path": "/inject/serving/llama",
                "port": 443,
            },
        },
        "failurePolicy": "Ignore",
        "matchPolicy": "Equivalent",
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "serving"}},
        "objectSelector": {
            "matchLabels": {"app": "llama"},
            "matchExpressions": [{"key": "sluicegate.dev/inject", "operator": "NotIn", "values": ["false"]}],
        },
        "reinvocationPolicy": "IfNeeded",
        "rules": [
            {
                "apiGroups": [""],
                "apiVersions": ["v1"],
                "operations": ["CREATE"],
                "resources": ["pods"],
                "scope": "Namespaced",
            }
        ],
        "sideEffects": "None",
        "timeoutSeconds": 5,
    }


def test_a_policy_that_rather_has_no_pod_says_so_in_its_entry() -> None:
    (entry,) = build_configuration([MISTRAL], TARGET)["webhooks"]
    assert entry["failurePolicy"] == "Fail"
    assert "matchLabels" not in entry["objectSelector"]


def test_entries_come_in_one_order_whatever_order_policies_come_in() -> None:
    other = Entry(namespace="a", name="z", selector=SELECTOR)
    names = [one["name"] for one in build_configuration([MISTRAL, other, LLAMA], TARGET)["webhooks"]]
    assert names == [entry_name("a", "z"), entry_name("serving", "llama"), entry_name("serving", "mistral")]


@pytest.mark.parametrize("namespace", ["kube-system", "sluicegate-system"])
def test_no_entry_reaches_the_namespaces_that_everything_stands_on(namespace: str) -> None:
    policy = Entry(namespace=namespace, name="all", selector=Selector())
    assert build_configuration([policy], TARGET)["webhooks"] == []
    assert namespace in excluded(namespace, TARGET)
    assert excluded("serving", TARGET) == ""


def test_a_policy_that_selects_nothing_has_no_entry() -> None:
    assert (
        build_configuration([Entry(namespace="serving", name="x", selector=None)], TARGET)["webhooks"] == []
    )


def test_names_are_unique_and_bounded() -> None:
    long = "a." * 100 + "b" * 53
    name = entry_name("n" * 63, long)
    assert len(name) <= MAX_ENTRY_NAME
    assert name.endswith(".inject.sluicegate.dev")
    assert name != entry_name("n" * 63, long[:-1] + "c")
    assert entry_name("b", "a") != entry_name("a", "b")


def test_entries_are_bounded() -> None:
    many = [
        Entry(namespace="n", name=f"p{number:04}", selector=SELECTOR) for number in range(MAX_ENTRIES + 5)
    ]
    entries = build_configuration(many, TARGET)["webhooks"]
    assert len(entries) == MAX_ENTRIES
    assert entries[0]["name"] == entry_name("n", "p0000")


def test_a_url_stands_in_for_the_service() -> None:
    target = Target(namespace="s", service="w", ca_bundle="QUJD", url="https://10.0.0.1:8443")
    (entry,) = build_configuration([LLAMA], target)["webhooks"]
    assert entry["clientConfig"] == {"url": "https://10.0.0.1:8443/inject/serving/llama", "caBundle": "QUJD"}
    assert entry_path("serving", "llama") == "/inject/serving/llama"


def test_the_bundle_is_given_or_injected_and_not_both() -> None:
    with pytest.raises(ValueError, match="given or injected"):
        Target(namespace="s", service="w")
    with pytest.raises(ValueError, match="given or injected"):
        Target(namespace="s", service="w", ca_bundle="QUJD", inject_ca_from="s/w")


# What to write.


def test_the_first_policy_creates_the_configuration_and_without_one_there_is_none() -> None:
    assert plan_configuration(None, build_configuration([], TARGET)) is None
    wanted = build_configuration([LLAMA], TARGET)
    change = plan_configuration(None, wanted)
    assert change is not None
    assert change.creates
    assert change.configuration == wanted


def test_at_rest_there_is_nothing_to_write() -> None:
    for target in (TARGET, CERT_MANAGER):
        wanted = build_configuration([LLAMA, MISTRAL], target)
        assert plan_configuration(live(wanted), wanted) is None


def test_labels_annotations_and_fields_of_others_and_of_later_servers_are_no_difference() -> None:
    wanted = build_configuration([LLAMA], TARGET)
    there = live(wanted)
    there["metadata"]["labels"] = {"a": "b", "theirs": "x"}
    there["metadata"]["annotations"] = {"theirs": "x"}
    there["webhooks"][0]["someLaterField"] = "defaulted"
    assert plan_configuration(there, wanted) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("failurePolicy", "Fail"),
        ("timeoutSeconds", 30),
        ("rules", []),
        ("objectSelector", {}),
        ("namespaceSelector", {}),
        ("reinvocationPolicy", "Never"),
        ("clientConfig", {"url": "https://elsewhere"}),
        ("matchConditions", [{"name": "never", "expression": "false"}]),
    ],
)
def test_what_somebody_has_changed_is_written_back(field: str, value: object) -> None:
    wanted = build_configuration([LLAMA, MISTRAL], TARGET)
    there = live(wanted)
    there["webhooks"][0][field] = value
    change = plan_configuration(there, wanted)
    assert change is not None
    assert not change.creates
    assert field in change.reasons[0]
    assert change.configuration["webhooks"] == wanted["webhooks"]
    assert change.configuration["metadata"]["resourceVersion"] == "7"


def test_an_entry_goes_with_its_policy_and_the_configuration_stays() -> None:
    change = plan_configuration(live(build_configuration([LLAMA], TARGET)), build_configuration([], TARGET))
    assert change is not None
    assert change.configuration["webhooks"] == []
    assert plan_configuration(live(change.configuration), build_configuration([], TARGET)) is None


def test_entries_of_others_in_our_configuration_go() -> None:
    wanted = build_configuration([LLAMA], TARGET)
    there = live(wanted)
    there["webhooks"].append({"name": "somebody.else.example"})
    change = plan_configuration(there, wanted)
    assert change is not None
    assert change.reasons == ("somebody.else.example: not wanted",)


def test_a_new_bundle_is_written_to_every_entry() -> None:
    there = live(build_configuration([LLAMA, MISTRAL], TARGET))
    wanted = build_configuration(
        [LLAMA, MISTRAL],
        Target(namespace="sluicegate-system", service="sluicegate-webhook", ca_bundle="REVG"),
    )
    change = plan_configuration(there, wanted)
    assert change is not None
    assert ca_bundles(change.configuration) == ["REVG", "REVG"]
    assert ca_bundles(there) == ["QUJD", "QUJD"]
    assert ca_bundles(None) == []


def test_the_bundle_that_cert_manager_injects_stays_and_a_new_entry_has_it_at_once() -> None:
    there = live(build_configuration([LLAMA], CERT_MANAGER))
    assert there["metadata"]["annotations"] == {INJECT_CA_FROM: "sluicegate-system/webhook"}
    there["webhooks"][0]["clientConfig"]["caBundle"] = "SU5K"
    assert plan_configuration(there, build_configuration([LLAMA], CERT_MANAGER)) is None
    change = plan_configuration(there, build_configuration([LLAMA, MISTRAL], CERT_MANAGER))
    assert change is not None
    assert ca_bundles(change.configuration) == ["SU5K", "SU5K"]


def test_going_from_cert_manager_to_our_own_authority_takes_its_annotation_away() -> None:
    there = live(build_configuration([LLAMA], CERT_MANAGER))
    there["metadata"]["annotations"]["theirs"] = "x"
    change = plan_configuration(there, build_configuration([LLAMA], TARGET))
    assert change is not None
    assert change.configuration["metadata"]["annotations"] == {"theirs": "x"}


def test_the_owner_is_the_installation_where_one_is_given() -> None:
    owner = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "name": "sluicegate",
        "uid": "1",
    }
    target = Target(namespace="s", service="w", ca_bundle="QUJD", owner=owner)
    wanted = build_configuration([LLAMA], target)
    assert wanted["metadata"]["ownerReferences"] == [owner]
    assert plan_configuration(live(wanted), wanted) is None
    change = plan_configuration(live(wanted, ownerReferences=[]), wanted)
    assert change is not None
    assert change.reasons == ("metadata.ownerReferences differ",)
    without = build_configuration([LLAMA], Target(namespace="s", service="w", ca_bundle="QUJD"))
    assert plan_configuration(live(wanted), without) is None
