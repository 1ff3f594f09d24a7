"""The webhook over real TLS connections: what is answered to which question, and what to none."""

import asyncio
import base64
import io
import json
import logging
import os
import signal
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from cryptography import x509
from tests.unit.policy_api_server import PolicyApiServer, policy, policy_api_server

from sluicegate_operator.certificates.authority import Pair, issue_authority, issue_serving
from sluicegate_operator.webhook.kube import PolicyApi
from sluicegate_operator.webhook.review import MAX_BODY_BYTES
from sluicegate_operator.webhook.run import Process
from sluicegate_operator.webhook.settings import Address, GateDefaults, Settings
from sluicegate_operator.webhook.tls import ServingCertificate

NAME = "sluicegate-webhook.sluicegate-system.svc"
LOCAL = Address("127.0.0.1", 0)
POD: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"generateName": "llama-7d9f-", "labels": {"app": "llama"}},
    "spec": {
        "containers": [
            {
                "name": "engine",
                "image": "ghcr.io/ggml-org/llama.cpp:server",
                "command": ["llama-server"],
                "args": ["--port", "8000", "-m", "/models/m.gguf"],
                "ports": [{"name": "http", "containerPort": 8000}],
            }
        ]
    },
}


def authority() -> Pair:
    return issue_authority(datetime.now(UTC), timedelta(days=1))


def place(directory: Path, signer: Pair) -> x509.Certificate:
    """Put a certificate into place as the kubelet does: a directory of its own, and a link that is swapped."""
    pair = issue_serving(signer, [NAME], datetime.now(UTC), timedelta(hours=1))
    version = directory / f"..{pair.certificate.serial_number}"
    version.mkdir(parents=True)
    (version / "tls.crt").write_bytes(pair.certificate_pem)
    (version / "tls.key").write_bytes(pair.key_pem)
    link = directory / "..new"
    link.symlink_to(version.name)
    os.replace(link, directory / "..data")
    for name in ("tls.crt", "tls.key"):
        if not (directory / name).is_symlink():
            (directory / name).symlink_to(f"..data/{name}")
    return pair.certificate


def trust(*signers: Pair) -> ssl.SSLContext:
    return ssl.create_default_context(cadata="".join(one.certificate_pem.decode() for one in signers))


def question(pod: dict[str, Any] | None = None, **request: Any) -> dict[str, Any]:
    """What an API server asks when a pod is created."""
    asked = {
        "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "namespace": "serving",
        "operation": "CREATE",
        "userInfo": {"username": "system:serviceaccount:kube-system:replicaset-controller"},
        "object": POD if pod is None else pod,
        "oldObject": None,
        "dryRun": False,
        "options": {"kind": "CreateOptions"},
    }
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": asked | request}


def patched(pod: dict[str, Any], response: dict[str, Any]) -> dict[str, Any]:
    """The pod as the API server makes it of the answer."""
    import jsonpatch

    assert response["patchType"] == "JSONPatch"
    result: dict[str, Any] = jsonpatch.apply_patch(pod, json.loads(base64.b64decode(response["patch"])))
    return result


def gates(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in pod["spec"].get("initContainers", []) if one["name"] == "sluicegate-gate"]


@dataclass
class Running:
    """One webhook, its API server, and a client."""

    process: Process
    server: PolicyApiServer
    http: aiohttp.ClientSession
    certificates: Path
    signer: Pair

    async def post(self, body: Any, path: str = "/inject/serving/llama") -> tuple[int, Any]:
        """Ask as an API server does: by the Service's name, verified by its authority."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(
            f"https://127.0.0.1:{self.process.port}{path}",
            data=io.BytesIO(data),
            headers={"content-type": "application/json"},
            server_hostname=NAME,
        ) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if answer.content_type == "application/json" else text

    async def ask(
        self, pod: dict[str, Any] | None = None, policy_name: str = "llama", **request: Any
    ) -> dict[str, Any]:
        """The response to a question, whose form is checked."""
        asked = question(pod, **request)
        status, answer = await self.post(asked, f"/inject/serving/{policy_name}")
        assert status == 200, answer
        assert (answer["apiVersion"], answer["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
        assert answer["response"]["uid"] == asked["request"]["uid"]
        assert answer["response"]["allowed"] is True
        assert all(len(line) <= 120 for line in answer["response"].get("warnings", []))
        result: dict[str, Any] = answer["response"]
        return result

    async def get(self, path: str) -> tuple[int, str]:
        async with self.http.get(f"http://127.0.0.1:{self.process.admin_port}{path}") as answer:
            return answer.status, await answer.text()

    async def metric(self, line: str) -> str | None:
        """The value of a sample, or None."""
        _, page = await self.get("/metrics")
        return next((one[len(line) + 1 :] for one in page.splitlines() if one.startswith(line + " ")), None)


@asynccontextmanager
async def running(directory: Path, *policies: dict[str, Any], delay_s: float = 0.0) -> AsyncIterator[Running]:
    signer, certificates = authority(), directory / "certificates"
    place(certificates, signer)
    async with policy_api_server() as server:
        for one in policies:
            server.put(one)
        settings = Settings(
            listen=LOCAL,
            admin=LOCAL,
            certificates=certificates,
            kubeconfig=None,
            namespaces=(),
            gate=GateDefaults(image="example.com/sluicegate:1"),
            shutdown_delay_s=delay_s,
            log_format="json",
            log_level="info",
        )
        process = Process(settings, [PolicyApi(server.kubeconfig(directory), None)])
        task = asyncio.create_task(process.run())
        connector = aiohttp.TCPConnector(ssl=trust(signer))
        try:
            async with aiohttp.ClientSession(connector=connector) as http:
                await process.listening.wait()
                await server.asked(f"watch {server.version}")
                yield Running(process, server, http, certificates, signer)
        finally:
            process.stop()
            process.stop()
            await task


# What is answered.


async def test_a_selected_pod_gets_its_gate(tmp_path: Path) -> None:
    async with running(tmp_path, policy("llama")) as webhook:
        response = await webhook.ask()
        pod = patched(POD, response)
        (gate,) = gates(pod)
        assert gate["image"] == "example.com/sluicegate:1"
        assert gate["restartPolicy"] == "Always"
        assert pod["metadata"]["annotations"]["sluicegate.dev/policy"] == "llama"
        assert pod["metadata"]["labels"]["sluicegate.dev/gated"] == "true"
        assert response["auditAnnotations"] == {"outcome": "injected"}
        sample = 'sluicegate_webhook_reviews_total{namespace="serving",outcome="injected",policy="llama"}'
        assert await webhook.metric(sample) == "1.0"


async def test_a_pod_that_has_its_gate_is_left_as_it_is_when_asked_again(tmp_path: Path) -> None:
    async with running(tmp_path, policy("llama")) as webhook:
        pod = patched(POD, await webhook.ask())
        pod["spec"]["containers"].append({"name": "added-by-another-webhook", "image": "x"})
        again = await webhook.ask(pod)
        assert "patch" not in again
        assert again["auditAnnotations"] == {"outcome": "already"}


async def test_each_pod_has_a_drain_token_of_its_own_which_is_not_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with running(tmp_path, policy("llama")) as webhook:
        tokens = []
        for _ in range(2):
            (gate,) = gates(patched(POD, await webhook.ask()))
            tokens += [one["value"] for one in gate["env"] if one["name"] == "SLUICEGATE_DRAIN_TOKEN"]
    assert len(set(tokens)) == 2
    assert all(len(token) >= 24 for token in tokens)
    assert not any(token in str(record.__dict__) for token in tokens for record in caplog.records)


async def test_of_two_policies_the_older_gates_and_the_newer_says_so_in_whatever_order_they_are_asked(
    tmp_path: Path,
) -> None:
    older, newer = (
        policy("zebra", created="2026-01-01T00:00:00Z"),
        policy("ant", created="2026-01-01T00:00:01Z"),
    )
    async with running(tmp_path, newer, older) as webhook:
        for order in (("zebra", "ant"), ("ant", "zebra")):
            pod, told = POD, []
            for name in order:
                response = await webhook.ask(pod, name)
                told += [line for line in response.get("warnings", []) if "older" in line or "ant" in line]
                pod = patched(pod, response) if "patch" in response else pod
            assert len(gates(pod)) == 1
            assert pod["metadata"]["annotations"]["sluicegate.dev/policy"] == "zebra"
            assert any("ant does not gate this pod" in line for line in told)


async def test_a_policy_that_is_gone_lets_pods_pass_and_says_so(tmp_path: Path) -> None:
    async with running(tmp_path) as webhook:
        response = await webhook.ask()
        assert "patch" not in response
        assert response["warnings"] == [
            "sluicegate: the pod is not gated: there is no AdmissionPolicy serving/llama"
        ]
        sample = 'sluicegate_webhook_reviews_total{namespace="",outcome="no_policy",policy=""}'
        assert await webhook.metric(sample) == "1.0", "a name that nobody has is no label"


async def test_a_policy_made_a_moment_ago_is_found_though_its_event_has_not_come(tmp_path: Path) -> None:
    async with running(tmp_path) as webhook:
        webhook.server.put(policy("llama"), told=False)
        assert "patch" in await webhook.ask()


async def test_a_policy_that_cannot_be_asked_for_is_an_error_on_which_the_failure_policy_acts(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as webhook:
        webhook.server.fail["get"] = [500]
        status, text = await webhook.post(question())
        assert status == 503
        assert "policy is not known yet" in text
        assert await webhook.metric('sluicegate_webhook_errors_total{reason="policy_unknown"}') == "1.0"


async def test_a_policy_that_never_was_valid_lets_pods_pass_and_says_why(tmp_path: Path) -> None:
    async with running(tmp_path, policy("llama", mode="Sideways")) as webhook:
        response = await webhook.ask()
        assert "patch" not in response
        assert "spec.mode" in " ".join(response["warnings"])
        assert response["auditAnnotations"] == {"outcome": "not_valid"}


async def test_a_pod_in_front_of_which_no_gate_can_stand_passes_with_the_reason(tmp_path: Path) -> None:
    pod = POD | {"spec": POD["spec"] | {"hostNetwork": True}}
    async with running(tmp_path, policy("llama")) as webhook:
        response = await webhook.ask(pod)
        assert response["auditAnnotations"] == {"outcome": "refused"}
        assert "hostNetwork" in " ".join(response["warnings"])
        assert "patch" not in response or not gates(patched(pod, response))


@pytest.mark.parametrize(
    ("change", "request_change", "outcome"),
    [
        ({"labels": {"app": "llama", "sluicegate.dev/inject": "false"}}, {}, "opted_out"),
        ({"labels": {"app": "other"}}, {}, "not_selected"),
        ({"labels": None}, {}, "not_selected"),
        ({}, {"operation": "UPDATE"}, "not_a_pod"),
        ({}, {"subResource": "status"}, "not_a_pod"),
        ({}, {"resource": {"group": "apps", "version": "v1", "resource": "deployments"}}, "not_a_pod"),
        ({}, {"namespace": "elsewhere"}, "not_a_pod"),
    ],
)
async def test_what_is_not_to_be_gated_passes_untouched(
    tmp_path: Path, change: dict[str, Any], request_change: dict[str, Any], outcome: str
) -> None:
    pod = POD | {"metadata": POD["metadata"] | change}
    async with running(tmp_path, policy("llama")) as webhook:
        response = await webhook.ask(pod, **request_change)
        assert "patch" not in response
        assert response["auditAnnotations"] == {"outcome": outcome}


async def test_a_dry_run_is_answered_like_any_other(tmp_path: Path) -> None:
    async with running(tmp_path, policy("llama")) as webhook:
        assert gates(patched(POD, await webhook.ask(dryRun=True)))


BROKEN = {"metadata": {"labels": {"app": "llama"}}, "spec": {"containers": "nonsense"}}


async def test_an_error_of_ours_lets_the_pod_pass_under_ignore_and_is_told(tmp_path: Path) -> None:
    async with running(tmp_path, policy("llama")) as webhook:
        response = await webhook.ask(BROKEN)
        assert response["auditAnnotations"]["outcome"] in ("failed", "refused")
        assert response["warnings"]


# What is not answered.


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"no json", 400),
        (b"[]", 400),
        (b"{}", 400),
        (b"[" * 200_000, 400),
        ({"apiVersion": "admission.k8s.io/v1beta1", "kind": "AdmissionReview", "request": {"uid": "x"}}, 400),
        ({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview"}, 400),
        ({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {"uid": ""}}, 400),
        (
            {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {"uid": "x" * 200}},
            400,
        ),
        ({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {"uid": "x"}}, 400),
        (b" " * (MAX_BODY_BYTES + 1), 413),
    ],
)
async def test_what_is_no_question_gets_an_error(tmp_path: Path, body: Any, status: int) -> None:
    async with running(tmp_path, policy("llama")) as webhook:
        answered, text = await webhook.post(body)
        assert answered == status
        assert text.startswith("sluicegate: ")
        assert "patch" in await webhook.ask(), "and the next one is answered"


async def test_other_paths_and_methods_are_not_served(tmp_path: Path) -> None:
    async with running(tmp_path, policy("llama")) as webhook:
        for path in ("/", "/inject/serving", "/metrics", "/healthz"):
            assert (await webhook.post(question(), path))[0] in (404, 405)


# Ready, and stopping.


async def test_it_is_ready_once_policies_are_known_and_a_certificate_is_there(tmp_path: Path) -> None:
    async with policy_api_server() as server:
        server.hold["list"] = asyncio.Event()
        settings = Settings(
            listen=LOCAL, admin=LOCAL, certificates=tmp_path / "certificates", kubeconfig=None, namespaces=(),
            gate=GateDefaults(image="x"), shutdown_delay_s=0.0, log_format="json", log_level="info",
        )  # fmt: skip
        process = Process(settings, [PolicyApi(server.kubeconfig(tmp_path), None)])
        task = asyncio.create_task(process.run())
        async with aiohttp.ClientSession() as http:
            await process.listening.wait()

            async def get(path: str) -> tuple[int, str]:
                async with http.get(f"http://127.0.0.1:{process.admin_port}{path}") as answer:
                    return answer.status, await answer.text()

            assert await get("/healthz") == (200, "ok\n")
            assert await get("/readyz") == (503, "no certificate yet\n")
            place(tmp_path / "certificates", authority())
            assert process.certificate.look()
            assert await get("/readyz") == (503, "policies are not known yet\n")
            server.hold["list"].set()
            await server.asked("watch 100")
            assert await get("/readyz") == (200, "ok\n")
        process.stop()
        await task


async def test_while_it_stops_it_says_so_answers_on_and_closes_connections(tmp_path: Path) -> None:
    async with running(tmp_path, policy("llama"), delay_s=60.0) as webhook:
        assert (await webhook.get("/readyz"))[0] == 200
        webhook.process.stop()
        assert await webhook.get("/readyz") == (503, "stopping\n")
        async with webhook.http.post(
            f"https://127.0.0.1:{webhook.process.port}/inject/serving/llama",
            json=question(),
            server_hostname=NAME,
        ) as answer:
            assert answer.status == 200
            assert answer.headers["connection"] == "close"
        assert "patch" in await webhook.ask()


# The certificate.


async def presented(port: int, context: ssl.SSLContext, name: str | None = NAME) -> x509.Certificate:
    """The certificate that a new connection gets."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
    try:
        der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return x509.load_der_x509_certificate(der)
    finally:
        writer.close()
        await writer.wait_closed()


async def test_a_new_certificate_is_served_to_new_connections_while_open_ones_go_on(tmp_path: Path) -> None:
    async with running(tmp_path, policy("llama")) as webhook:
        assert "patch" in await webhook.ask()  # this connection stays open
        before = await presented(webhook.process.port, trust(webhook.signer))
        other = authority()
        after = place(webhook.certificates, other)
        assert await presented(webhook.process.port, trust(webhook.signer)) == before, "not looked at yet"
        assert webhook.process.certificate.look()
        assert not webhook.process.certificate.look()
        assert await presented(webhook.process.port, trust(other)) == after
        with pytest.raises(ssl.SSLCertVerificationError):
            await presented(webhook.process.port, trust(webhook.signer))
        assert "patch" in await webhook.ask(), "the old connection is not touched"
        assert await webhook.metric('sluicegate_webhook_certificate_reloads_total{result="loaded"}') == "2.0"


async def test_a_client_that_names_nobody_gets_the_new_one_too(tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    async with running(tmp_path, policy("llama")) as webhook:
        after = place(webhook.certificates, authority())
        webhook.process.certificate.look()
        # An address is not sent as a server's name.
        assert await presented(webhook.process.port, context, "127.0.0.1") == after


@pytest.mark.parametrize(
    "damage",
    [
        lambda there: (there / "tls.key").write_bytes(b""),
        lambda there: (there / "tls.crt").write_bytes(
            b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
        ),
        lambda there: (there / "tls.crt").write_bytes(b"x" * 100_000),
        lambda there: (there / "tls.key").write_bytes(authority().key_pem),
        lambda there: (there / "..data" / "tls.key").unlink(),
    ],
)
def test_files_that_cannot_be_used_change_nothing(tmp_path: Path, damage: Any) -> None:
    served = ServingCertificate(tmp_path)
    place(tmp_path, authority())
    assert served.look()
    before = served.loaded
    place(tmp_path, authority())
    damage(tmp_path)
    assert not served.look()
    assert served.loaded == before
    assert served.reloads == {"loaded": 1, "bad": 1}
    place(tmp_path, authority())
    assert served.look()


# As a process.


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--gate-image is required"),
        (["--gate-image=x", "--gate-requests=cpu"], "--gate-requests 'cpu' is not RESOURCE=QUANTITY"),
        (["--gate-image=x", "--gate-limits=memory=lots"], "--gate-limits 'memory=lots'"),
        (["--gate-image=x", "--gate-user=0"], "--gate-user '0'"),
        (["--gate-image=x", "--listen=8443"], "--listen '8443' is not HOST:PORT"),
        (["--gate-image=x", "--shutdown-delay=-1"], "--shutdown-delay '-1' is not a number of seconds"),
        (["--gate-image=x", "--namespace=a,B"], "--namespace 'B' is not the name of a namespace"),
        (["--gate-image=x", "--namespace=" + ",".join(f"n{i}" for i in range(60))], "60 names, over 50"),
        (["--gate-image=x", "--kubeconfig=/nonexistent"], "no usable configuration of a cluster"),
    ],
)
def test_what_cannot_be_started_is_told_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sluicegate_operator.webhook.run import main

    monkeypatch.delenv("KUBECONFIG", raising=False)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


PROGRAM = "import sys; from sluicegate_operator.webhook.run import main; sys.exit(main())"


async def test_sigterm_ends_the_process_in_good_order(tmp_path: Path) -> None:
    certificates = tmp_path / "certificates"
    place(certificates, authority())
    async with policy_api_server() as server:
        arguments = [
            "--listen=127.0.0.1:0", "--admin=127.0.0.1:0", f"--certificates={certificates}", "--gate-image=x",
            f"--kubeconfig={server.kubeconfig(tmp_path)}", "--shutdown-delay=0", "--log-format=json",
        ]  # fmt: skip
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PROGRAM, *arguments, stderr=asyncio.subprocess.PIPE
        )
        ended, asked = (
            asyncio.create_task(process.communicate()),
            asyncio.create_task(server.asked("watch 100")),
        )
        await asyncio.wait([ended, asked], return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        _, error = await ended
    assert process.returncode == 0, error.decode()
    records = [json.loads(line) for line in error.decode().splitlines()]
    assert [
        record["message"] for record in records if record["message"].startswith(("listening", "stopping"))
    ] == [
        "listening",
        "stopping: answers for another 0 s",
    ]
