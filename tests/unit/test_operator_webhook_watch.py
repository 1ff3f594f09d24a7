"""The table of policies, kept by list and watch over real sockets, whatever the API server's side does."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest
from tests.unit.policy_api_server import PolicyApiServer, policy, policy_api_server

from sluicegate_operator.webhook.kube import KubeError, PolicyApi
from sluicegate_operator.webhook.policies import MAX_POLICIES, PolicyStore
from sluicegate_operator.webhook.watch import MAX_FAILURES, Policies, PolicyWatch


class Followed:
    """A watch that runs, and the means to wait until it has seen something."""

    def __init__(self, api: PolicyApi) -> None:
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self.watch = PolicyWatch(api, Random(1), self._on_change)

    def _on_change(self) -> None:
        task = asyncio.create_task(self._notify())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def names(self, *names: str) -> None:
        """Until exactly these policies are known."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: sorted(one.name for one in self.watch.store.within("serving")) == sorted(names)
            )


@asynccontextmanager
async def following(server: PolicyApiServer, directory: Path) -> AsyncIterator[Followed]:
    api = PolicyApi(server.kubeconfig(directory), None)
    followed = Followed(api)
    task = asyncio.create_task(followed.watch.run())
    try:
        yield followed
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await api.close()


async def test_what_there_is_and_what_changes_is_known(tmp_path: Path) -> None:
    async with policy_api_server() as server:
        server.put(policy("first"))
        async with following(server, tmp_path) as followed:
            await followed.names("first")
            assert followed.watch.synced.is_set()
            await server.asked("watch 101")
            server.put(policy("second"))
            await followed.names("first", "second")
            server.put(policy("first", mode="Off"))
            server.delete("second")
            await followed.names("first")
            known = followed.watch.store.get("serving", "first")
            assert known is not None
            assert known.spec is not None
            assert known.spec.mode == "Off"


async def test_many_policies_come_in_pages(tmp_path: Path) -> None:
    async with policy_api_server() as server:
        for number in range(600):
            server.put(policy(f"p{number:03}"))
        async with following(server, tmp_path) as followed:
            await followed.watch.synced.wait()
            assert len(followed.watch.store) == 600
            assert server.requests[:3] == ["list"] * 3


async def test_a_watch_that_ends_goes_on_from_the_last_version_bookmarks_included(tmp_path: Path) -> None:
    async with policy_api_server() as server, following(server, tmp_path) as followed:
        await server.asked("watch 100")
        server.put(policy("other", namespace="elsewhere"), told=False)
        server.put(policy("another", namespace="elsewhere"), told=False)
        server.bookmark()
        server.cut()
        await server.asked("watch 102")
        assert server.requests.count("list") == 1
        server.put(policy("first"))
        await followed.names("first")


async def test_a_version_that_has_expired_is_listed_anew_and_what_is_gone_is_gone(tmp_path: Path) -> None:
    async with policy_api_server() as server:
        server.put(policy("first"))
        server.put(policy("second"))
        async with following(server, tmp_path) as followed:
            await followed.names("first", "second")
            await server.asked("watch 102")
            del server.objects["serving", "first"]
            server.put(policy("third"), told=False)
            server.expire()
            await followed.names("second", "third")
            assert server.requests.count("list") == 2


async def test_410_as_a_status_is_the_same(tmp_path: Path) -> None:
    async with policy_api_server() as server:
        server.fail["watch"] = [410]
        async with following(server, tmp_path):
            await server.asked("list", 2)


@pytest.mark.parametrize("garbage", [b"no json\n", b"[]\n", b'{"type": 1}\n', b"[" * 100_000 + b"\n"])
async def test_what_is_no_event_ends_the_watch_and_nothing_else(tmp_path: Path, garbage: bytes) -> None:
    async with policy_api_server() as server:
        server.put(policy("first"))
        async with following(server, tmp_path) as followed:
            await followed.names("first")
            await server.asked("watch 101")
            server.send(garbage)
            await server.asked("watch 101", 2)
            server.put(policy("second"))
            await followed.names("first", "second")
            assert followed.watch.failures["watch"] == 1


async def test_an_api_server_that_is_away_is_asked_again_and_what_was_known_stays(tmp_path: Path) -> None:
    async with policy_api_server() as server:
        server.put(policy("first"))
        server.fail["list"] = [503]
        async with following(server, tmp_path) as followed:
            await followed.names("first")
            assert followed.watch.failures["list"] == 1
            await server.asked("watch 101")
            server.fail["watch"] = [500, 503]
            server.cut()
            await server.asked("watch 101", 3)
            await followed.names("first")


async def test_a_policy_whose_event_has_not_come_is_asked_for(tmp_path: Path) -> None:
    async with policy_api_server() as server, following(server, tmp_path) as followed:
        await followed.watch.synced.wait()
        server.put(policy("first"), told=False)
        found = await followed.watch.find("serving", "first")
        assert found is not None
        assert found.name == "first"


async def test_a_name_that_nobody_has_is_asked_for_once_in_a_while(tmp_path: Path) -> None:
    async with policy_api_server() as server, following(server, tmp_path) as followed:
        await followed.watch.synced.wait()
        await server.asked("watch 100")
        for _ in range(5):
            assert await followed.watch.find("serving", "nobody") is None
        assert server.requests.count("get nobody") == 1
        server.put(policy("nobody"))
        await followed.names("nobody")
        assert await followed.watch.find("serving", "nobody") is not None


async def test_who_cannot_be_asked_for_is_not_taken_for_absent(tmp_path: Path) -> None:
    async with policy_api_server() as server, following(server, tmp_path) as followed:
        server.fail["get"] = [500]
        with pytest.raises(KubeError, match="500"):
            await followed.watch.find("serving", "first")
        server.hold["get"] = asyncio.Event()
        with pytest.raises(KubeError, match=r"no answer|timed out|Timeout"):
            await followed.watch.find("serving", "first")
        assert followed.watch.failures["get"] == 2


async def test_after_many_failures_in_a_row_all_is_listed_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster restored from a backup may never reach the version that is waited for."""
    monkeypatch.setattr("sluicegate_operator.webhook.watch.MIN_BACKOFF_S", 0.0)
    async with policy_api_server() as server:
        server.fail["watch"] = [504] * MAX_FAILURES
        async with following(server, tmp_path):
            await server.asked("list", 2)
            assert server.requests.count("watch 100") == MAX_FAILURES


async def test_some_namespaces_are_followed_by_a_watch_each(tmp_path: Path) -> None:
    async with policy_api_server() as server:
        for namespace in ("a", "b", "c"):
            server.put(policy("first", namespace=namespace))
        apis = [PolicyApi(server.kubeconfig(tmp_path), namespace) for namespace in ("a", "b")]
        policies = Policies([PolicyWatch(api, Random(1)) for api in apis])
        assert not policies.synced
        assert policies.last_heard is None
        tasks = [asyncio.create_task(one.run()) for one in policies.watches]
        await server.asked("watch 103", 2)
        assert policies.synced
        assert len(policies) == 2
        assert [one.namespace for one in policies.within("b")] == ["b"]
        assert await policies.find("a", "first") is not None
        assert await policies.find("c", "first") is None
        assert list(policies.within("c")) == []
        assert policies.failures == {"list": 0, "watch": 0, "get": 0}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for api in apis:
            await api.close()


@pytest.mark.parametrize("text", ["", "{}", "nonsense: ["])
def test_a_configuration_that_cannot_be_used_is_told(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    with pytest.raises(KubeError, match="no usable configuration"):
        PolicyApi(path, None)


# The table alone.


def test_an_invalid_change_leaves_the_last_valid_spec_in_force(caplog: pytest.LogCaptureFixture) -> None:
    store = PolicyStore()
    store.put(policy("first", mode="Shadow"))
    for _ in range(3):
        known = store.put(policy("first", mode="Sideways"))
    assert known.spec is not None
    assert known.spec.mode == "Shadow"
    assert "spec.mode" in known.problem
    assert [record.levelname for record in caplog.records] == ["WARNING"], "told once"
    again = store.put(policy("first", mode="Off"))
    assert (again.problem, again.spec and again.spec.mode) == ("", "Off")


def test_a_policy_that_never_was_valid_selects_nobody() -> None:
    known = PolicyStore().put(policy("first", classes=[]))
    assert known.spec is None
    assert known.selector is None


def test_a_policy_made_anew_under_its_name_begins_anew() -> None:
    store = PolicyStore()
    store.put(policy("first"))
    other = policy("first", classes=[])
    other["metadata"]["uid"] = "another"
    assert store.put(other).spec is None


def test_a_policy_that_is_being_deleted_selects_nobody() -> None:
    document = policy("first")
    document["metadata"]["deletionTimestamp"] = "2026-01-02T00:00:00Z"
    assert PolicyStore().put(document).selector is None


def test_the_table_is_bounded() -> None:
    store = PolicyStore()
    for number in range(MAX_POLICIES):
        store.put(policy(f"p{number}"))
    store.put(policy("one-too-many"))
    assert len(store) == MAX_POLICIES
    assert store.get("serving", "one-too-many") is None
    store.remove("serving", "p0")
    store.put(policy("one-too-many"))
    assert len(store) == MAX_POLICIES
