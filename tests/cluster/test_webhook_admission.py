"""The webhook asked by a real API server: who is gated, by whom, and what becomes of pods while it is away."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
from aiohttp import web
from tests.cluster.admission import (
    HOST,
    Created,
    Namespace,
    Rig,
    free_port,
    metrics,
    namespace,
    place,
    pod,
    rig,
    start_hook,
    target_of,
    until,
)

from sluicegate_core.policy import FailurePolicy, LabelOperator, LabelRequirement, Selector
from sluicegate_operator.certificates.authority import issue_authority, issue_serving
from sluicegate_operator.kube.resources import PODS, POLICIES
from sluicegate_operator.selection import query, selects
from sluicegate_operator.webhook.review import allow, read_review
from sluicegate_operator.webhook_configuration import Entry, entry_name, plan_configuration

SELECTOR = Selector(match_labels=(("app", "llama"),))


def entry(there: Namespace, name: str = "llama", **fields: Any) -> Entry:
    return Entry(namespace=there.name, name=name, selector=fields.pop("selector", SELECTOR), **fields)


async def in_force(there: Namespace) -> None:
    """Until the API server asks the webhook about pods of the namespace."""

    async def gated() -> Created | None:
        created = await there.create_pod(pod(), dry_run=True)
        return created if created.gates else None

    await until(gated, "pods are gated")


@asynccontextmanager
async def gating(
    kubeconfig: Path, directory: Path, failure_policy: FailurePolicy = FailurePolicy.IGNORE
) -> AsyncIterator[Rig]:
    """A webhook, a policy, its entry, in force."""
    async with rig(kubeconfig, directory) as here:
        await here.there.create_policy("llama")
        await here.there.configure([entry(here.there, failure_policy=failure_policy)], here.target)
        await in_force(here.there)
        yield here


async def test_a_selected_pod_is_gated_and_others_are_not_asked_about(
    kubeconfig: Path, tmp_path: Path
) -> None:
    async with gating(kubeconfig, tmp_path) as here:
        created = await here.there.create_pod(pod())
        assert created.status == 201
        assert len(created.gates) == 1
        assert created.owner == "llama"
        before = await metrics(here.hook)
        for labels in ({"app": "other"}, {}, {"app": "llama", "sluicegate.dev/inject": "false"}):
            created = await here.there.create_pod(pod(labels))
            assert created.status == 201
            assert created.gates == []
        after = await metrics(here.hook)
        asked = "sluicegate_webhook_review_seconds_count"
        assert before[asked] == after[asked]


async def test_what_is_stored_is_what_was_answered_and_a_dry_run_stores_nothing(
    kubeconfig: Path, tmp_path: Path
) -> None:
    async with gating(kubeconfig, tmp_path) as here:
        dry = await here.there.create_pod(pod(generateName=None, name="dry"), dry_run=True)
        assert len(dry.gates) == 1
        assert await here.there.api.get(PODS, here.there.name, "dry") is None
        created = await here.there.create_pod(pod(generateName=None, name="wet"))
        stored = await here.there.api.get(PODS, here.there.name, "wet")
        assert stored is not None
        assert stored["spec"] == created.body["spec"]


async def test_who_creates_a_pod_that_cannot_be_gated_is_warned(kubeconfig: Path, tmp_path: Path) -> None:
    async with gating(kubeconfig, tmp_path) as here:
        one = pod()
        one["spec"]["hostNetwork"] = True
        created = await here.there.create_pod(one)
        assert created.status == 201
        assert created.gates == []
        assert any("hostNetwork" in warning for warning in created.warnings)
        assert all(len(warning) <= 120 for warning in created.warnings)


async def test_of_two_policies_the_older_gates_whichever_entry_the_api_server_calls_first(
    kubeconfig: Path, tmp_path: Path
) -> None:
    async with rig(kubeconfig, tmp_path) as here:
        there = here.there
        # Of one second, as the API server tells it, the name decides: "older" comes after "newer" then, so that
        # they have to be a second apart.
        first = await there.create_policy("older")

        async def a_later_second() -> bool | None:
            second = await there.create_policy("newer")
            if second["metadata"]["creationTimestamp"] > first["metadata"]["creationTimestamp"]:
                return True
            await there.api.delete(POLICIES, there.name, "newer", second["metadata"]["uid"])
            return None

        await until(a_later_second, "the second policy is younger")
        for order in (("older", "newer"), ("newer", "older")):
            # One configuration an entry: the API server calls configurations in the order of their names.
            for index, name in enumerate(order):
                await there.configure([entry(there, name)], here.target, name=f"{there.name}-{index}")

            async def both_fire() -> Created | None:
                created = await there.create_pod(pod(), dry_run=True)
                told = any("newer does not gate this pod" in warning for warning in created.warnings)
                return created if created.gates and told else None

            created = await until(both_fire, "both entries fire")
            assert len(created.gates) == 1
            assert created.owner == "older"


async def test_a_policy_is_in_force_for_the_first_pod_after_its_entry(
    kubeconfig: Path, tmp_path: Path
) -> None:
    """The entry may be there before the webhook has heard of the policy: it asks."""
    async with gating(kubeconfig, tmp_path) as here:
        for number in range(10):
            name = f"late-{number}"
            selector = Selector(match_labels=(("app", name),))
            await here.there.configure([entry(here.there, name, selector=selector)], here.target)

            async def asked(name: str = name) -> bool | None:
                created = await here.there.create_pod(pod({"app": name}), dry_run=True)
                return any("there is no AdmissionPolicy" in warning for warning in created.warnings) or None

            await until(asked, "the entry fires")
            await here.there.create_policy(name, selector={"matchLabels": {"app": name}})

            async def gated(name: str = name) -> bool | None:
                return bool((await here.there.create_pod(pod({"app": name}), dry_run=True)).gates) or None

            await until(gated, "the policy gates")


async def test_nothing_is_left_to_write_once_the_api_server_has_taken_the_configuration(
    kubeconfig: Path, tmp_path: Path
) -> None:
    """What it defaults is stated already."""
    async with rig(kubeconfig, tmp_path) as here:
        several = [entry(here.there), entry(here.there, "all", selector=Selector())]
        live = await here.there.configure(several, here.target)
        wanted = {key: value for key, value in live.items() if key != "metadata"}
        again = await here.there.configure(several, here.target)
        assert again["metadata"]["generation"] == live["metadata"]["generation"]
        assert again["webhooks"] == wanted["webhooks"]
        from sluicegate_operator.webhook_configuration import build_configuration

        assert plan_configuration(live, build_configuration(several, here.target) | {
            "metadata": {"name": live["metadata"]["name"], "labels": {}}
        }) is None  # fmt: skip


# What becomes of pods while the webhook is away.


async def test_while_it_is_away_a_pod_starts_without_a_gate_under_ignore(
    kubeconfig: Path, tmp_path: Path
) -> None:
    async with gating(kubeconfig, tmp_path) as here:
        here.hook.kill()
        await here.hook.process.wait()
        created = await here.there.create_pod(pod())
        assert created.status == 201
        assert created.gates == []


async def test_while_it_is_away_a_pod_is_refused_under_fail_and_the_message_names_the_entry(
    kubeconfig: Path, tmp_path: Path
) -> None:
    async with gating(kubeconfig, tmp_path, FailurePolicy.FAIL) as here:
        here.hook.kill()
        await here.hook.process.wait()
        created = await here.there.create_pod(pod())
        assert created.status == 500
        assert entry_name(here.there.name, "llama") in created.body["message"]
        assert (await here.there.create_pod(pod({"app": "other"}))).status == 201, "and nobody else is"
        again = await start_hook(here.kubeconfig, here.hook.directory, here.there.name)
        try:
            await here.there.configure(
                [entry(here.there, failure_policy=FailurePolicy.FAIL)],
                target_of(again.port, here.authority.certificate_pem),
            )
            await in_force(here.there)
        finally:
            await again.stop()


@pytest.mark.slow
async def test_under_fail_a_pod_waits_no_longer_than_the_entry_says(kubeconfig: Path, tmp_path: Path) -> None:
    """A port that takes connections and never answers is the worst that can be away."""
    held: list[asyncio.StreamWriter] = []

    async def hang(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)

    async with rig(kubeconfig, tmp_path) as here:
        server = await asyncio.start_server(hang, HOST, 0)
        try:
            port = server.sockets[0].getsockname()[1]
            target = target_of(port, here.authority.certificate_pem)
            await here.there.configure([entry(here.there, failure_policy=FailurePolicy.FAIL)], target)

            async def refused() -> Created | None:
                created = await here.there.create_pod(pod(), dry_run=True)
                return created if created.status != 201 else None

            created = await until(refused, "the entry is in force")
            assert created.status == 500
            assert "context deadline exceeded" in created.body["message"]
        finally:
            for writer in held:
                writer.transport.abort()
            server.close()


# Selection, against the API server's own.

KEYS, VALUES = ("app", "tier", "example.com/zone"), ("", "a", "b-c", "d.e_f")


def some_selector(random: Random) -> Selector:
    labels = {random.choice(KEYS): random.choice(VALUES) for _ in range(random.randrange(2))}
    expressions = []
    for _ in range(random.randrange(3)):
        operator = random.choice(list(LabelOperator))
        takes_values = operator in (LabelOperator.IN, LabelOperator.NOT_IN)
        values = tuple(random.sample(VALUES, random.randrange(1, 4))) if takes_values else ()
        expressions.append(LabelRequirement(random.choice(KEYS), operator, values))
    return Selector(match_labels=tuple(sorted(labels.items())), match_expressions=tuple(expressions))


@asynccontextmanager
async def recorder(directory: Path) -> AsyncIterator[tuple[int, bytes, list[str]]]:
    """A webhook that lets everything pass and notes which entries fired."""
    now = datetime.now(UTC)
    authority = issue_authority(now, timedelta(days=1))
    serving = issue_serving(authority, [HOST], now, timedelta(hours=1))
    place(directory, serving.certificate_pem, serving.key_pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "tls.crt", directory / "tls.key")
    fired: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        fired.append(request.match_info["policy"])
        return web.json_response(allow(read_review(await request.read()).uid))

    app = web.Application()
    app.router.add_post("/inject/{namespace}/{policy}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, HOST, port, ssl_context=context).start()
    try:
        yield port, authority.certificate_pem, fired
    finally:
        await runner.cleanup()


async def test_entries_fire_and_lists_find_exactly_what_we_say_a_selector_selects(
    kubeconfig: Path, tmp_path: Path
) -> None:
    random = Random(20260301)
    selectors = [Selector(), *(some_selector(random) for _ in range(29))]
    pods = [
        {},
        *(
            {key: random.choice(VALUES) for key in random.sample(KEYS, random.randrange(4))}
            for _ in range(29)
        ),
    ]
    async with namespace(kubeconfig) as there, recorder(tmp_path) as (port, authority_pem, fired):
        entries = [entry(there, f"s{index}", selector=one) for index, one in enumerate(selectors)]
        await there.configure(entries, target_of(port, authority_pem))

        async def all_in_force() -> bool | None:
            fired.clear()
            await there.create_pod(pod({}), dry_run=True)
            return "s0" in fired or None

        await until(all_in_force, "the entries fire")
        selected = 0
        for number, labels in enumerate(pods):
            fired.clear()
            created = await there.create_pod(pod(labels, generateName=None, name=f"p{number}"))
            assert created.status == 201, created.body
            ours = {f"s{index}" for index, one in enumerate(selectors) if selects(one, labels)}
            assert set(fired) == ours, labels
            assert len(fired) == len(ours)
            selected += len(ours)
        assert 100 < selected < 800, "neither nothing nor everything is selected"
        for one in selectors:
            found = [
                each["metadata"]["name"] async for each in there.api.list(PODS, there.name, labels=query(one))
            ]
            assert sorted(found) == sorted(
                f"p{number}" for number, labels in enumerate(pods) if selects(one, labels)
            )


async def test_a_pod_changed_by_a_later_webhook_is_asked_about_again_and_has_one_gate(
    kubeconfig: Path, tmp_path: Path
) -> None:
    """A webhook that adds a container, called after ours: the API server then asks ours again."""
    async with gating(kubeconfig, tmp_path) as here:
        there = here.there
        added = [
            {
                "op": "add",
                "path": "/spec/containers/-",
                "value": {"name": "mesh", "image": "example.com/mesh"},
            }
        ]

        async def add(request: web.Request) -> web.Response:
            review = read_review(await request.read())
            has = any(one["name"] == "mesh" for one in review.pod["spec"]["containers"])
            return web.json_response(allow(review.uid, patch=None if has else added))

        serving = issue_serving(here.authority, [HOST], datetime.now(UTC), timedelta(hours=1))
        place(tmp_path / "mesh", serving.certificate_pem, serving.key_pem)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tmp_path / "mesh" / "tls.crt", tmp_path / "mesh" / "tls.key")
        app = web.Application()
        app.router.add_post("/inject/{namespace}/{policy}", add)
        runner = web.AppRunner(app)
        await runner.setup()
        port = free_port()
        await web.TCPSite(runner, HOST, port, ssl_context=context).start()
        try:
            target = target_of(port, here.authority.certificate_pem)
            await there.configure([entry(there, "mesh")], target, name=f"{there.name}-zz-mesh")

            async def meshed() -> Created | None:
                created = await there.create_pod(pod(), dry_run=True)
                return created if len(created.body["spec"]["containers"]) == 2 else None

            before = await metrics(here.hook)
            created = await until(meshed, "the other webhook is in force")
            assert len(created.gates) == 1
            again = f'sluicegate_webhook_reviews_total{{namespace="{there.name}",outcome="already",policy="llama"}}'
            assert (await metrics(here.hook))[again] > before.get(again, 0.0)
            assert json.dumps(created.body).count('"SLUICEGATE_DRAIN_TOKEN"') == 1
        finally:
            await runner.cleanup()
