"""A rolling restart under load: no stream is cut, and no request fails at a client with the SDK's own retries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.cluster.engines import Load, Site, site

#: Of one stream. With little CPU it lasts longer than the gate goes on admitting, and than a pod's usual grace.
TOKENS = 600
CLIENTS = 8
#: Slows the engine down, so that streams are under way whenever a pod ends.
LITTLE_CPU = {"requests": {"cpu": "10m"}, "limits": {"cpu": "100m"}}
REPLICAS = 2


@pytest.fixture
async def here(kubeconfig: Path, gate_image: str, engine_image: str) -> AsyncIterator[Site]:
    async with site(kubeconfig, gate_image, engine_image) as there:
        yield there


async def restart_under_load(here: Site, url: str) -> Load:
    """Restart all pods, one after another, while clients stream; ends when all streams have."""
    load = Load(url, TOKENS)
    clients = asyncio.ensure_future(load.run(CLIENTS))
    while not load.texts and not load.errors:
        await asyncio.wait([clients], timeout=1)
    restart = {"spec": {"template": {"metadata": {"annotations": {"restarted": "once"}}}}}
    before = {pod["metadata"]["name"] for pod in await here.pods()}
    await here.patch("deployments", "llama", restart)
    await here.rolled_out(REPLICAS)
    assert before.isdisjoint(pod["metadata"]["name"] for pod in await here.pods())
    load.stop()
    await clients
    return load


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_no_stream_is_cut_and_no_request_fails(here: Site) -> None:
    template = here.inject(here.pod(resources=LITTLE_CPU)).pod
    load = await restart_under_load(here, await here.deploy(template, REPLICAS))
    assert load.errors == []
    assert len(load.texts) >= CLIENTS
    assert set(load.texts) == {load.texts[0]}, "every stream says all of it"
    events = (await here.get("events"))["items"]
    assert [event["message"] for event in events if event["reason"] == "FailedPreStopHook"] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_without_a_gate_streams_are_cut(here: Site) -> None:
    """So the test above can fail."""
    load = await restart_under_load(here, await here.deploy(here.pod(resources=LITTLE_CPU), REPLICAS))
    assert load.errors
