"""The whole way on a real cluster: a Deployment as it was, a policy, the webhook, and pods that are gated."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx2 as httpx
import pytest
from tests.cluster.admission import HOST, namespace, place, start_hook, target_of
from tests.cluster.engines import Json, Site, until

from sluicegate_core.policy import Selector
from sluicegate_operator.certificates.authority import issue_authority, issue_serving
from sluicegate_operator.webhook_configuration import Entry

TOKEN_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_deployment_is_restarted_and_its_pods_are_gated(
    kubeconfig: Path, gate_image: str, engine_image: str, tmp_path: Path
) -> None:
    now = datetime.now(UTC)
    authority = issue_authority(now, timedelta(days=1))
    serving = issue_serving(authority, [HOST], now, timedelta(hours=1))
    place(tmp_path, serving.certificate_pem, serving.key_pem)
    async with namespace(kubeconfig) as there:
        here = Site(there.name, there.http, gate_image, engine_image)
        await until(here.account, "the namespace has its service account")
        url = await here.deploy(here.pod(), 1)
        assert "x-sluicegate-reason" not in (await ask(url)).headers

        hook = await start_hook(
            kubeconfig, tmp_path, there.name, f"--gate-image={gate_image}", "--gate-image-pull-policy=Never",
            "--gate-requests=cpu=10m,memory=64Mi",
        )  # fmt: skip
        try:
            await there.create_policy("llama")
            selector = Selector(match_labels=(("app", "llama"),))
            target = target_of(hook.port, authority.certificate_pem)
            await there.configure([Entry(namespace=there.name, name="llama", selector=selector)], target)

            async def gated() -> bool | None:
                created = await there.create_pod(
                    {"metadata": {"name": "asked"}} | here.pod(metadata={"name": "asked"}), dry_run=True
                )
                return bool(created.gates) or None

            await until(gated, "the API server asks the webhook")
            restart = {"spec": {"template": {"metadata": {"annotations": {"restarted": "once"}}}}}
            await here.patch("deployments", "llama", restart)
            await here.rolled_out(1)
        finally:
            await hook.stop()

        (pod,) = await here.pods()
        check(pod)
        answer = await ask(url)
        assert (answer.status_code, answer.headers["x-sluicegate-reason"]) == (200, "admitted")


def check(pod: Json) -> None:
    (gate,) = pod["spec"]["initContainers"]
    assert gate["name"] == "sluicegate-gate"
    assert pod["metadata"]["annotations"]["sluicegate.dev/policy"] == "llama"
    assert pod["spec"]["terminationGracePeriodSeconds"] == 330
    # The plugin that mounts tokens runs again after a webhook has changed a pod.
    mounts = {one["mountPath"]: one["name"] for one in gate["volumeMounts"]}
    assert mounts[TOKEN_PATH] == "sluicegate-policy"
    assert pod["spec"]["containers"][0]["volumeMounts"][0]["mountPath"] == TOKEN_PATH
    token = next(one["value"] for one in gate["env"] if one["name"] == "SLUICEGATE_DRAIN_TOKEN")
    headers = pod["spec"]["containers"][0]["lifecycle"]["preStop"]["httpGet"]["httpHeaders"]
    assert headers == [{"name": "x-sluicegate-token", "value": token}]
    assert len(token) >= 22, "128 bits"


async def ask(url: str) -> httpx.Response:
    question = {"model": "m", "messages": [{"role": "user", "content": "hello 5"}], "max_tokens": 5}
    async with httpx.AsyncClient(timeout=60) as http:
        return await http.post(f"{url}/v1/chat/completions", json=question)
