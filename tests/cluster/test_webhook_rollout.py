"""The webhook's replicas are replaced one after another while a real API server creates pods all the while.

The policy says Fail, so that one question without an answer refuses a pod.
"""

import asyncio
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.cluster.admission import HOST, namespace, place, pod, splitter, start_hook, target_of, until

from sluicegate_core.policy import FailurePolicy, Selector
from sluicegate_operator.certificates.authority import issue_authority, issue_serving
from sluicegate_operator.webhook_configuration import Entry

#: Pods created between SIGTERM and the moment at which the Service no longer leads to the replica.
LAG_PODS = 20
DELAY = "--shutdown-delay=5"


@pytest.mark.slow
async def test_no_admission_fails_while_replicas_are_replaced(kubeconfig: Path, tmp_path: Path) -> None:
    now = datetime.now(UTC)
    authority = issue_authority(now, timedelta(days=1))
    serving = issue_serving(authority, [HOST], now, timedelta(hours=1))
    certificates = tmp_path / "certificates"
    place(certificates, serving.certificate_pem, serving.key_pem)
    async with AsyncExitStack() as stack:
        there = await stack.enter_async_context(namespace(kubeconfig))
        await there.create_policy("llama")
        hooks = []
        for _ in range(2):
            hooks.append(await start_hook(kubeconfig, certificates, there.name, DELAY))
            stack.push_async_callback(hooks[-1].stop)
        port = await stack.enter_async_context(splitter(hooks))
        selector = Selector(match_labels=(("app", "llama"),))
        entry = Entry(
            namespace=there.name, name="llama", selector=selector, failure_policy=FailurePolicy.FAIL
        )
        await there.configure([entry], target_of(port, authority.certificate_pem))

        async def gated() -> bool | None:
            return bool((await there.create_pod(pod(), dry_run=True)).gates) or None

        async def create(pods: int) -> None:
            for _ in range(pods // 2):
                created = await asyncio.gather(*(there.create_pod(pod(), dry_run=True) for _ in range(2)))
                assert [(one.status, len(one.gates)) for one in created] == [(201, 1)] * 2, created

        await until(gated, "pods are gated")
        for _ in range(2):
            await create(LAG_PODS)
            leaves = hooks[0]
            leaves.process.terminate()
            await create(LAG_PODS)
            hooks.remove(leaves)  # the Service leads elsewhere now
            while leaves.process.returncode is None:
                await create(LAG_PODS)
            assert leaves.process.returncode == 0
            hooks.append(await start_hook(kubeconfig, certificates, there.name, DELAY))
            stack.push_async_callback(hooks[-1].stop)
        await create(LAG_PODS)
        await asyncio.gather(*(hook.stop() for hook in hooks))
