"""The gate's container and the end of the pod: what is put in, and what the pod keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.manifests.building import CONTEXT, container, engine_of, gate_of, gated, pod, policy
from tests.manifests.pod_security import violations

from sluicegate_core.policy import GateSpec, Policy
from sluicegate_operator.injection import InjectionContext, inject

SYSCTL = "net.ipv4.ip_unprivileged_port_start"


PLAIN = GateSpec()


def with_gate(
    given: dict[str, Any], gate: GateSpec = PLAIN, context: InjectionContext = CONTEXT
) -> dict[str, Any]:
    result = inject(given, replace(policy(), gate=gate), context)
    return gate_of(result)


def drained(seconds: float) -> Policy:
    return replace(policy(), drain_timeout_s=seconds)


def test_the_whole_container() -> None:
    result = gated(pod())
    assert gate_of(result) == {
        "name": "sluicegate-gate",
        "image": "registry.example/gate:1",
        "restartPolicy": "Always",
        "args": [
            "--policy=/etc/sluicegate/policy",
            "--upstream=http://127.0.0.1:27000",
            "--listen=:8000",
            "--admin=:9901",
            "--drain-timeout=300",
        ],
        "env": [{"name": "SLUICEGATE_DRAIN_TOKEN", "value": "t0ken"}],
        "ports": [{"name": "gate-admin", "containerPort": 9901, "protocol": "TCP"}],
        "resources": {"requests": {"cpu": "100m", "memory": "96Mi"}, "limits": {"memory": "768Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "privileged": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "runAsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "sluicegate-policy", "mountPath": "/etc/sluicegate/policy", "readOnly": True},
            {
                "name": "sluicegate-policy",
                "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount",
                "readOnly": True,
            },
        ],
        "readinessProbe": {
            "httpGet": {"path": "/readyz", "port": 9901, "scheme": "HTTP"},
            "periodSeconds": 5,
            "timeoutSeconds": 3,
            "failureThreshold": 2,
        },
        "livenessProbe": {
            "httpGet": {"path": "/healthz", "port": 9901, "scheme": "HTTP"},
            "initialDelaySeconds": 10,
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
    }
    volume = {"name": "sluicegate-policy", "configMap": {"name": "sluicegate-policy-llama", "optional": True}}
    assert result.pod["spec"]["volumes"] == [volume]


def test_the_installation_and_the_policy_have_their_say() -> None:
    context = replace(
        CONTEXT, image_pull_policy="Never", requests=(("cpu", "1"),), limits=(), extra_args=("--log-level=debug",),
        run_as_user=None,
    )  # fmt: skip
    gate = with_gate(pod(), PLAIN, context)
    assert gate["imagePullPolicy"] == "Never"
    assert gate["resources"] == {"requests": {"cpu": "1"}}
    assert gate["args"][-1] == "--log-level=debug"
    assert "runAsUser" not in gate["securityContext"]
    spec = GateSpec(
        image="example/own:2", image_pull_policy="Always", requests=(("memory", "1Gi"),), limits=(("cpu", "2"),),
        extra_args=("--log-format=json",),
    )  # fmt: skip
    gate = with_gate(pod(), spec, context)
    assert (gate["image"], gate["imagePullPolicy"]) == ("example/own:2", "Always")
    assert gate["resources"] == {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "2"}}
    assert gate["args"][-2:] == ["--log-level=debug", "--log-format=json"]


def test_the_gate_is_last_among_those_that_start_before() -> None:
    before = [
        {"name": "istio-init", "image": "x"},
        {"name": "istio-proxy", "image": "x", "restartPolicy": "Always"},
        {"name": "download", "image": "x"},
    ]
    result = gated(pod(initContainers=before))
    assert result.pod["spec"]["initContainers"][:-1] == before
    assert gate_of(result)["restartPolicy"] == "Always"


GUARANTEED = {"limits": {"cpu": "8", "memory": "32Gi"}}


def test_a_guaranteed_pod_stays_guaranteed() -> None:
    """Else it would lose its exclusive CPUs, and be evicted earlier."""
    given = pod(container(resources=GUARANTEED))
    gate = with_gate(given)
    assert gate["resources"] == {
        "requests": {"cpu": "500m", "memory": "768Mi"},
        "limits": {"cpu": "500m", "memory": "768Mi"},
    }
    own = with_gate(given, GateSpec(requests=(("cpu", "2"),), limits=(("cpu", "2"), ("memory", "1Gi"))))
    assert own["resources"]["requests"] == own["resources"]["limits"] == {"cpu": "2", "memory": "1Gi"}


@pytest.mark.parametrize(
    "resources",
    [
        {"limits": {"memory": "32Gi"}},
        {"requests": {"cpu": "8", "memory": "32Gi"}},
    ],
)
def test_other_pods_need_no_limits(resources: dict[str, Any]) -> None:
    assert with_gate(pod(container(resources=resources)))["resources"]["limits"] == {"memory": "768Mi"}


def test_where_all_limit_their_cpu_the_gate_does_too() -> None:
    """A quota may demand it; without it the pod would not be created any more."""
    limited = {"limits": {"cpu": "8", "memory": "32Gi"}, "requests": {"cpu": "4", "memory": "32Gi"}}
    gate = with_gate(pod(container(resources=limited)))
    assert gate["resources"]["limits"] == {"cpu": "1", "memory": "768Mi"}
    assert gate["resources"]["requests"] == {"cpu": "100m", "memory": "96Mi"}
    other = {"name": "other", "image": "x"}
    assert "cpu" not in with_gate(pod(container(resources=limited), other))["resources"]["limits"]


def test_a_pod_that_states_resources_as_a_whole_has_no_room_for_more() -> None:
    whole = {"requests": {"cpu": "4"}, "limits": {"cpu": "8"}}
    assert with_gate(pod(resources=whole))["resources"] == {}


# Ports that need a privilege.


def test_a_low_port_is_opened_by_a_safe_sysctl() -> None:
    low = container(args=["--model=m", "--port=80"], ports=None)
    spec = gated(pod(low)).pod["spec"]
    assert spec["securityContext"] == {"sysctls": [{"name": SYSCTL, "value": "80"}]}
    others = {"fsGroup": 1, "sysctls": [{"name": "a", "value": "1"}, {"name": SYSCTL, "value": "1024"}]}
    spec = gated(pod(low, securityContext=others)).pod["spec"]
    assert spec["securityContext"] == {
        "fsGroup": 1, "sysctls": [{"name": "a", "value": "1"}, {"name": SYSCTL, "value": "80"}],
    }  # fmt: skip
    enough = {"sysctls": [{"name": SYSCTL, "value": "0"}]}
    assert gated(pod(low, securityContext=enough)).pod["spec"]["securityContext"] == enough
    assert "securityContext" not in gated(pod()).pod["spec"]


# The end of the pod.


@pytest.mark.parametrize(
    ("hook", "settle_s"),
    [
        (None, 5),
        ({"sleep": {"seconds": 30}}, 30),
        ({"sleep": {"seconds": 2}}, 5),
        ({"exec": {"command": ["sleep", "15"]}}, 15),
        ({"exec": {"command": ["/bin/sleep", "15s"]}}, 15),
        ({"exec": {"command": ["/bin/sh", "-c", "sleep 20"]}}, 20),
        ({"exec": {"command": ["bash", "-c", " exec /usr/bin/sleep 7; "]}}, 7),
    ],
)
def test_a_hook_that_only_sleeps_becomes_a_drain_that_settles_as_long(hook: Any, settle_s: int) -> None:
    lifecycle = {"postStart": {"exec": {"command": ["true"]}}} | ({"preStop": hook} if hook else {})
    result = gated(pod(container(lifecycle=lifecycle)))
    assert engine_of(result)["lifecycle"] == {
        "postStart": {"exec": {"command": ["true"]}},
        "preStop": {
            "httpGet": {
                "path": f"/drain?timeout=300&settle={settle_s}",
                "port": 9901,
                "scheme": "HTTP",
                "httpHeaders": [{"name": "x-sluicegate-token", "value": "t0ken"}],
            }
        },
    }
    assert "lifecycle" not in gate_of(result)


@pytest.mark.parametrize(
    "hook",
    [
        {"exec": {"command": ["/bin/sh", "-c", "sleep 20; ray stop"]}},
        {"exec": {"command": ["sleep", "$N"]}},
        {"httpGet": {"path": "/bye", "port": 8000}},
    ],
)
def test_any_other_hook_is_kept_and_the_gate_drains_beside_it(hook: dict[str, Any]) -> None:
    result = gated(pod(container(lifecycle={"preStop": hook})))
    assert engine_of(result)["lifecycle"] == {"preStop": hook}
    assert gate_of(result)["lifecycle"]["preStop"]["httpGet"]["path"] == "/drain?timeout=300&settle=5"
    assert any("preStop hook of its own" in one for one in result.warnings)


@pytest.mark.parametrize(
    ("given", "drain_s", "expected"),
    [
        (None, 300.0, 330),
        (10, 300.0, 330),
        (600, 300.0, 600),
        (None, 0.5, 35),
        (None, 86_400.0, 86_400),
        (0, 0.0, 35),
    ],
)
def test_the_grace_period_fits_the_drain(given: int | None, drain_s: float, expected: int) -> None:
    spec = {} if given is None else {"terminationGracePeriodSeconds": given}
    result = inject(pod(**spec), drained(drain_s), CONTEXT)
    assert result.pod["spec"]["terminationGracePeriodSeconds"] == expected
    assert f"--drain-timeout={drain_s:g}" in gate_of(result)["args"]


# Meshes.


def test_istio_in_front_of_the_admin_port() -> None:
    proxy = {"name": "istio-proxy", "image": "x", "restartPolicy": "Always"}
    result = gated(pod(initContainers=[proxy]))
    assert not {"readinessProbe", "livenessProbe"} & gate_of(result).keys()
    assert any("excludeInboundPorts" in one for one in result.warnings)
    told = pod(container(), {"name": "istio-proxy", "image": "x"})
    told["metadata"]["annotations"] = {"traffic.sidecar.istio.io/excludeInboundPorts": "15020, 9901"}
    result = gated(told)
    assert {"readinessProbe", "livenessProbe"} <= gate_of(result).keys()
    assert result.warnings == ()


# Pod Security.

RESTRICTED = {
    "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
}
TIGHT = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_a_restricted_pod_stays_restricted() -> None:
    for low in ("80", "8000"):
        given = pod(
            container(args=["--model=m", f"--port={low}"], ports=None, securityContext=TIGHT), **RESTRICTED
        )
        assert violations(given) == []
        assert violations(gated(given).pod) == []


def test_the_gate_is_restricted_in_a_pod_that_is_not() -> None:
    given = pod(container(securityContext={"privileged": True}), securityContext={"runAsUser": 0})
    before, after = violations(given), violations(gated(given).pod)
    assert before
    assert after == before


# A pod that has a gate already.


@pytest.mark.parametrize(("told", "status"), [(None, {}), ("{", {}), ("[]", {}), ('{"port":1}', {"port": 1})])
def test_a_gate_is_not_given_twice(told: str | None, status: dict[str, Any]) -> None:
    """Whoever put it there, and whatever its annotation says."""
    given = pod(initContainers=[{"name": "sluicegate-gate", "image": "x", "restartPolicy": "Always"}])
    if told is not None:
        given["metadata"]["annotations"] = {"sluicegate.dev/injection": told}
    result = gated(given)
    assert (result.pod, result.status, result.warnings) == (given, status, ())


def test_a_label_keeps_a_pod_out() -> None:
    given = pod()
    given["metadata"]["labels"]["sluicegate.dev/inject"] = "false"
    result = inject(given, policy(), CONTEXT)
    assert result.pod == given
    assert result.refusal is not None
    assert "opts out" in result.refusal
    given["metadata"]["labels"]["sluicegate.dev/inject"] = "no"
    assert gated(given).status["takeover"] == "Auto"
