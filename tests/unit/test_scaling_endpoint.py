"""The board and the endpoint, over real sockets: a number where it is known, an error wherever it is not."""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp.test_utils import TestServer
from tests.unit.test_scaling_ledger import Gate

from sluicegate_operator.scaling import Board, Bounds, Demand, PolicyKey, Unknown, Why, scaling_app
from sluicegate_operator.scaling.board import MAX_AGE_S
from sluicegate_operator.scaling.report import CapacityReport

KEY = PolicyKey("serving", "llama-70b")
PATH = "/scaling/serving/llama-70b"
BOUNDS = Bounds(min_replicas=1, max_replicas=8)


class World:
    """A board on a clock that is moved, one gate, and the endpoint on a real socket."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.board = Board(lambda: self.now)
        self.gate = Gate("a", began_at=self.now)
        self.gate.capacity = CapacityReport(work_per_s=100.0, pressed_s=30.0, ended=50.0, age_s=0.0)

    def polls(self, times: int = 4, work: float = 800.0) -> None:
        for _ in range(times):
            self.board.post(KEY, [self.gate.found(self.now)], BOUNDS)
            self.gate.takes(work)
            self.gate.pressed_s += 5.0
            self.now += 5.0
        self.board.post(KEY, [self.gate.found(self.now)], BOUNDS)


@pytest.fixture
def world() -> World:
    return World()


class Asks:
    """A client of the endpoint."""

    def __init__(self, server: TestServer, session: aiohttp.ClientSession) -> None:
        self._server, self._session = server, session

    async def get(self, path: str = PATH, method: str = "GET", **headers: str) -> tuple[int, Any]:
        url = self._server.make_url("/").join(self._server.make_url(path))
        async with self._session.request(method, url, headers=headers) as response:
            return response.status, await response.json() if response.content_type.endswith("json") else None


@pytest_asyncio.fixture
async def asks(world: World) -> AsyncIterator[Asks]:
    async with TestServer(scaling_app(world.board)) as server, aiohttp.ClientSession() as session:
        yield Asks(server, session)


async def test_the_demand_with_what_it_rests_on(world: World, asks: Asks) -> None:
    world.polls()
    world.now += 1.5
    status, body = await asks.get()
    assert status == 200
    assert body == {
        "demand": 2.0,
        "replicas": 2,
        "ready": 1,
        "starting": 0,
        "work_per_s": 160.0,
        "capacity_per_s": 100.0,
        "reason": "Measured",
        "message": "offered work over the measured work of a replica: 2.00 replicas needed, 1 ready, 0 starting",
        "age_s": 1.5,
    }


async def test_a_restarted_operator_says_503_for_whatever_is_asked(world: World, asks: Asks) -> None:
    for path in (PATH, "/scaling/a/b"):
        status, body = await asks.get(path)
        assert (status, body["reason"]) == (503, "JustStarted")


async def test_it_takes_two_polls_until_there_is_a_rate(world: World, asks: Asks) -> None:
    world.board.listed = True
    world.board.watch(KEY)
    assert (await asks.get())[0] == 503
    world.polls(times=1)
    status, body = await asks.get()
    assert (status, body["reason"]) == (503, "JustStarted")
    world.polls(times=1)
    assert (await asks.get())[0] == 200


async def test_a_policy_that_is_not_there_is_404_once_that_can_be_known(world: World, asks: Asks) -> None:
    world.board.listed = True
    status, body = await asks.get("/scaling/serving/other")
    assert (status, body["error"]) == (404, "no AdmissionPolicy other in namespace serving")
    world.polls()
    world.board.forget(KEY)
    assert (await asks.get())[0] == 404


async def test_silent_gates_are_503_with_the_reason(world: World, asks: Asks) -> None:
    world.polls()
    world.gate.answers = False
    world.polls()
    status, body = await asks.get()
    assert status == 503
    assert body == {"error": "1 of 1 ready gates do not answer", "reason": "GatesSilent"}


async def test_a_poller_that_hangs_is_503_and_not_its_last_word(world: World, asks: Asks) -> None:
    world.polls()
    world.now += MAX_AGE_S
    assert (await asks.get())[0] == 200
    world.now += 1.0
    status, body = await asks.get()
    assert status == 503
    assert body == {"error": "the gates were last polled 16 s ago", "reason": "Stale"}


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/scaling",
        "/scaling/serving",
        "/scaling/Serving/x",
        "/scaling/a/%2e%2e",
        "/scaling/a/" + "b" * 300,
    ],
)
async def test_what_is_no_name_is_not_looked_up(world: World, asks: Asks, path: str) -> None:
    assert (await asks.get(path))[0] == 404


async def test_it_only_reads(world: World, asks: Asks) -> None:
    world.polls()
    for method in ("POST", "PUT", "DELETE"):
        assert (await asks.get(method=method))[0] == 405
    assert (await asks.get(method="HEAD"))[0] == 200


async def test_with_a_token_only_who_shows_it(world: World) -> None:
    world.polls()
    app = scaling_app(world.board, token="s3cret")
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        asks = Asks(server, session)
        for wrong in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s3cret"}):
            status, body = await asks.get(**wrong)
            assert status == 401
            assert "s3cret" not in str(body)
        assert (await asks.get(Authorization="Bearer s3cret"))[0] == 200
        assert (await asks.get("/scaling/x/y"))[0] == 401  # nothing is told before that


def test_the_board_keeps_what_is_read_off_it_apart(world: World) -> None:
    world.polls()
    answer, age_s = world.board.read(KEY) or (None, None)
    assert isinstance(answer, Demand)
    assert age_s == 0.0
    other = world.board.post(PolicyKey("serving", "other"), [], BOUNDS)
    assert isinstance(other, Unknown)
    assert other.why is Why.NO_REPLICAS
    assert world.board.read(KEY) == (answer, 0.0)
