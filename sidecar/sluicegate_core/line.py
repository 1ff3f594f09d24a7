"""The line: who waits, and whose turn it is.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) on two levels, in units of work: classes share
the engine by weight, the clients of a class (flows) share the class equally. Each class and each flow has a
virtual tag, the virtual time at which its next request starts; the least tag goes next and is then charged
`cost / weight`. While two classes both have requests waiting, the work they were given, over their weights,
differs by at most one request of each; so nobody starves.

- An idle class or flow banks nothing: when it comes back its tag is raised to the least among those that wait,
  or, where nobody does, to that of the last who went (as in the fair scheduler for LLMs of Sheng et al., VTC, OSDI
  2024). So is that of a class that could not go because of a cap of its own.
- The estimate is charged at hand-over and settled at the end with the truth. A refund may take the tag of one who
  waits below all others: it has been charged too much against them, and gets it back.
- Every operation is O(1) in the number of waiting requests, and O(log flows) at hand-over: requests of a flow
  are a doubly linked list, so that one can leave from the middle.
- Bounded: `MAX_FLOWS` flows a class; clients beyond that share `OVERFLOW_FLOWS` flows by a hash.

Owned by the `Controller`. Whether the engine can take one at all is `handover`'s question.
"""

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import Final
from zlib import crc32

from sluicegate_core.request import Request

MAX_FLOWS: Final = 4096
OVERFLOW_FLOWS: Final = 64
#: Clients not seen before between two sweeps for forgotten ones: keeps the sweep's cost constant a request.
SWEEP_EVERY: Final = 1024


class Flow:
    """The requests of one client within one class, first come, first served."""

    __slots__ = ("client", "cost", "count", "head", "in_heap", "queue", "tag", "tail")

    def __init__(self, client: str, queue: "ClassQueue") -> None:
        self.client = client
        self.queue = queue
        self.head: Request | None = None
        self.tail: Request | None = None
        self.count = 0
        self.cost = 0.0
        self.tag = 0.0
        self.in_heap = False  # at most one entry a flow, or the heap would grow with every client that leaves


class ClassQueue:
    """The waiting requests of one class, by flow."""

    __slots__ = (
        "_heap",
        "_pushes",
        "_unknown",
        "active_flows",
        "cost",
        "count",
        "flows",
        "tag",
        "virtual",
        "weight",
    )

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.tag = 0.0  # of the class, on the scale of the line
        self.virtual = 0.0  # tag of the flow that went last
        self.flows: dict[str, Flow] = {}
        self.active_flows = 0
        self.count = 0
        self.cost = 0.0
        self._heap: list[tuple[float, int, Flow]] = []
        self._pushes = 0
        self._unknown = 0

    def flow_of(self, client: str) -> Flow:
        flow = self.flows.get(client)
        if flow is None:
            self._unknown += 1
            if self._unknown >= SWEEP_EVERY:
                self._forget_idle_flows()
            if len(self.flows) >= MAX_FLOWS:
                client = f"overflow-{crc32(client.encode()) % OVERFLOW_FLOWS}"
                flow = self.flows.get(client)
                if flow is not None:
                    return flow
            flow = self.flows[client] = Flow(client, self)
        return flow

    def _forget_idle_flows(self) -> None:
        """Drop flows that are owed nothing and owe nothing: idle, and paid up to the virtual time."""
        self._unknown = 0
        for client in [
            c for c, f in self.flows.items() if not f.count and not f.in_heap and f.tag <= self.virtual
        ]:
            del self.flows[client]

    def append(self, request: Request) -> None:
        flow = self.flow_of(request.client)
        if not flow.count:
            level = self.next_flow().tag if self.count else self.virtual
            if flow.tag < level:
                flow.tag = level
        request.flow = flow
        request.previous = flow.tail
        request.next = None
        if flow.tail is None:
            flow.head = request
        else:
            flow.tail.next = request
        flow.tail = request
        flow.count += 1
        flow.cost += request.cost
        if flow.count == 1:
            self.active_flows += 1
            if not flow.in_heap:
                self._push(flow)
        self.count += 1
        self.cost += request.cost

    def unlink(self, request: Request) -> None:
        flow = request.flow
        assert isinstance(flow, Flow)
        if request.previous is None:
            flow.head = request.next
        else:
            request.previous.next = request.next
        if request.next is None:
            flow.tail = request.previous
        else:
            request.next.previous = request.previous
        request.previous = request.next = None
        flow.count -= 1
        self.count -= 1
        if flow.count:
            flow.cost -= request.cost
        else:
            flow.cost = 0.0
            self.active_flows -= 1
        self.cost = self.cost - request.cost if self.count else 0.0

    def _push(self, flow: Flow) -> None:
        self._pushes += 1
        flow.in_heap = True
        heappush(self._heap, (flow.tag, self._pushes, flow))

    def next_flow(self) -> Flow:
        """The flow whose turn it is; the class must not be empty.

        Heap entries are neither removed when a flow empties nor moved when its tag grows: an entry whose flow
        is empty is dropped, one that is too early is pushed anew, when it comes to the top.
        """
        heap = self._heap
        while True:
            tag, _, flow = heap[0]
            if flow.count and tag >= flow.tag:
                return flow
            heappop(heap)
            flow.in_heap = False
            if flow.count:
                self._push(flow)

    def charge(self, flow: Flow, cost: float) -> None:
        """`flow`, which `next_flow` named, is handed `cost`."""
        heappop(self._heap)
        flow.in_heap = False
        self.virtual = flow.tag
        flow.tag += cost
        if flow.count:
            self._push(flow)


class Line:
    """All classes' queues."""

    __slots__ = ("count", "joined_level", "joins", "queues", "virtual")

    def __init__(self, weights: list[int]) -> None:
        self.queues = [ClassQueue(float(w)) for w in weights]
        self.virtual = 0.0
        self.count = 0
        self.joins = 0
        self.joined_level = 0.0

    def append(self, request: Request) -> None:
        queue = self.queues[request.class_index]
        if not queue.count:
            level = min((q.tag for q in self.queues if q.count), default=self.virtual)
            if queue.tag < level:
                queue.tag = level
            self.joins += 1
            self.joined_level = level
        queue.append(request)
        self.count += 1

    def remove(self, request: Request) -> None:
        """Take a waiting request out, wherever it stands; nothing is charged."""
        self.queues[request.class_index].unlink(request)
        self.count -= 1

    def turn(self, held: Callable[[int], object]) -> ClassQueue | None:
        """The class whose turn it is among those that are not `held` (by class index); None if all are."""
        best: ClassQueue | None = None
        for index, queue in enumerate(self.queues):
            if queue.count and (best is None or queue.tag < best.tag) and not held(index):
                best = queue
        return best

    def next(self, held: Callable[[int], object]) -> Request | None:
        """The request whose turn it is.

        A class that is passed because it is held has its tag raised to the virtual time: time at its own cap
        earns it nothing.
        """
        best = self.turn(held)
        if best is None:
            return None
        for queue in self.queues:
            if queue.tag < best.tag and queue.count:
                queue.tag = best.tag
        return best.next_flow().head

    def take(self, request: Request) -> None:
        """Hand over the request that `next` returned: it leaves the line, its flow and class are charged."""
        queue = self.queues[request.class_index]
        flow = request.flow
        assert isinstance(flow, Flow)
        self.virtual = queue.tag
        request.joins_at_take = self.joins
        queue.tag += request.cost / queue.weight
        queue.unlink(request)
        self.count -= 1
        queue.charge(flow, request.cost)

    def settle(self, request: Request, true_cost: float) -> None:
        """Correct what `take` charged, now that the truth is known. A refund never reaches below zero debt."""
        flow = request.flow
        if not isinstance(flow, Flow):
            return
        queue = flow.queue
        difference = true_cost - request.cost
        # Who joined since joined at the level that the estimates stood at then: a refund of what was charged
        # before must not put its class ahead of the newcomer.
        least = 0.0
        if difference < 0.0 and request.joins_at_take != self.joins:
            least = min(queue.tag, self.joined_level)
        queue.tag = max(queue.tag + difference / queue.weight, least)
        flow.tag = max(flow.tag + difference, 0.0)

    def ahead_of(self, class_index: int, client: str, cost: float) -> tuple[float, float]:
        """(cost, requests) that would be served before a new request of this client within its class.

        Fair queueing serves each other flow at most what this flow gets, so it is the flow's own backlog
        times the flows that wait; and never more than all that waits in the class.
        """
        queue = self.queues[class_index]
        if not queue.count:
            return 0.0, 0.0
        flow = queue.flows.get(client)
        own_cost, own_count = (flow.cost, flow.count) if flow is not None else (0.0, 0)
        others = queue.active_flows - 1 if own_count else queue.active_flows
        ahead_cost = own_cost + (own_cost + cost) * others
        ahead_count = own_count + (own_count + 1) * others
        return (
            ahead_cost if ahead_cost < queue.cost else queue.cost,
            float(ahead_count if ahead_count < queue.count else queue.count),
        )

    def __iter__(self) -> Iterator[Request]:
        for queue in self.queues:
            for flow in queue.flows.values():
                request = flow.head
                while request is not None:
                    yield request
                    request = request.next
