"""The ledger: what many gates said, each thing counted once, whatever restarts, comes, goes and falls silent."""

from dataclasses import replace

import pytest

from sluicegate_operator.scaling.ledger import (
    ENOUGH_TO_CORRECT,
    FRESH_S,
    LONG_S,
    MAX_ENTRIES,
    SHORT_S,
    Fleet,
    Ledger,
    Replica,
    ReplicaState,
)
from sluicegate_operator.scaling.report import CapacityReport, ClassReport, GateReport

POLL_S = 5.0
UNMEASURED = CapacityReport(work_per_s=None, pressed_s=0.0, ended=0.0, age_s=None)


class Gate:
    """A gate's counters, moved by the test."""

    def __init__(self, uid: str, began_at: float = 0.0, state: ReplicaState = ReplicaState.READY) -> None:
        self.uid = uid
        self.state = state
        self.answers = True
        self.gated = True
        self.capacity = UNMEASURED
        self.waiting = 0.0
        self._last: tuple[GateReport, float] | None = None
        self.restart(began_at)

    def restart(self, now: float) -> None:
        self.began_at = now
        self.instance = f"{self.uid} since {now}"
        self.pressed_s = 0.0
        self.counts = ClassReport(
            offered=0, retries=0, admitted=0, queued=0, served=0, served_in_slo=0, rejected={}, evicted={},
            failed={}, waiting=0, running=0, work_offered=0.0, work_predicted=0.0, work_served=0.0, work_failed=0.0,
        )  # fmt: skip

    def takes(self, work: float, *, proves: float = 1.0, requests: int = 1, refused: int = 0) -> None:
        """Work offered and served, which proves to be so many times the estimate."""
        old = self.counts
        self.counts = replace(
            old,
            offered=old.offered + requests,
            rejected={"ttft": old.rejected.get("ttft", 0) + refused, "engine_down": 7},
            work_offered=old.work_offered + work,
            work_predicted=old.work_predicted + work,
            work_served=old.work_served + proves * work,
        )

    def found(self, now: float) -> Replica:
        if self.answers:
            report = GateReport(
                instance=self.instance, uptime_s=now - self.began_at, content_hash="", generation=1,
                mode="Enforce", error=None, problems=(), engine_status="up", engine_slots=None, engine_running=0,
                engine_reported_running=None, engine_reported_waiting=None, engine_reported_age_s=None,
                draining=False, classes={"all": self.counts}, work_waiting=self.waiting, pressed=False,
                pressed_s=self.pressed_s, capacity=self.capacity,
            )  # fmt: skip
            self._last = report, now
        report_, at = self._last or (None, 0.0)
        return Replica(uid=self.uid, state=self.state, gated=self.gated, report=report_, reported_at=at)


class Polls:
    """A ledger that is handed in all gates, each `POLL_S`."""

    def __init__(self, *gates: Gate, now: float = 0.0) -> None:
        self.now = now
        self.gates = list(gates)
        self.ledger = Ledger(now)
        self.book()

    def book(self) -> None:
        self.ledger.book(self.now, [gate.found(self.now) for gate in self.gates])

    def poll(self, seconds: float, work: float = 0.0, **how: float) -> None:
        """So many seconds; each gate takes so much work between two polls."""
        for _ in range(round(seconds / POLL_S)):
            for gate in self.gates:
                gate.takes(work, **how)  # type: ignore[arg-type]
            self.now += POLL_S
            self.book()


def test_the_rate_is_of_all_gates() -> None:
    polls = Polls(Gate("a"), Gate("b"))
    polls.poll(60.0, work=500.0)
    assert polls.ledger.flow(SHORT_S).work_per_s == pytest.approx(200.0)
    assert polls.ledger.flow(SHORT_S).span_s == SHORT_S


def test_the_short_window_forgets_what_the_long_one_keeps() -> None:
    polls = Polls(Gate("a"))
    polls.poll(60.0, work=500.0)
    polls.poll(SHORT_S)
    assert polls.ledger.flow(SHORT_S).work_per_s == 0.0
    assert polls.ledger.flow(LONG_S).work_per_s == pytest.approx(100.0 * 60 / 90)
    polls.poll(LONG_S)
    assert polls.ledger.flow(LONG_S).work_per_s == 0.0


def test_what_a_gate_counted_before_it_was_watched_is_not_of_now() -> None:
    old = Gate("a", began_at=-3600.0)
    old.takes(1e9, requests=1000)
    polls = Polls(old)
    polls.poll(SHORT_S)
    assert polls.ledger.flow(LONG_S).work_per_s == 0.0


def test_a_restarted_gate_begins_anew_and_nothing_goes_backwards() -> None:
    gate = Gate("a")
    polls = Polls(gate)
    polls.poll(SHORT_S, work=500.0)
    gate.restart(polls.now)
    polls.poll(SHORT_S, work=500.0)
    assert polls.ledger.flow(SHORT_S).work_per_s == pytest.approx(100.0)


def test_a_new_pod_counts_from_its_first_request() -> None:
    polls = Polls(Gate("a"))
    polls.poll(SHORT_S)
    polls.gates.append(Gate("b", began_at=polls.now))
    polls.poll(POLL_S, work=600.0)
    assert polls.ledger.flow(POLL_S).work_per_s == pytest.approx(240.0)


def test_what_a_pod_took_before_it_went_stays_counted() -> None:
    polls = Polls(Gate("a"), Gate("b"))
    polls.poll(10.0, work=600.0)
    del polls.gates[1]
    polls.poll(10.0, work=600.0)
    assert polls.ledger.flow(20.0).work_per_s == pytest.approx((2 * 1200 + 1200) / 20)


def test_a_long_silence_is_no_surge_afterwards() -> None:
    gate = Gate("a")
    polls = Polls(gate)
    polls.poll(SHORT_S, work=500.0)
    gate.answers = False
    polls.poll(60.0, work=500.0, requests=10, refused=2)
    gate.pressed_s += 30.0
    assert polls.ledger.fleet == Fleet(ready=1, silent=1)
    gate.answers = True
    polls.poll(POLL_S, work=500.0, requests=10, refused=2)
    assert polls.ledger.fleet == Fleet(ready=1)
    flow = polls.ledger.flow(POLL_S)
    assert flow.work_per_s == pytest.approx(100.0)
    assert (flow.arrivals, flow.turned_away) == (pytest.approx(10.0), pytest.approx(2.0))
    assert flow.pressed_share == pytest.approx(30.0 / 65.0)


def test_an_answer_handed_in_twice_is_counted_once() -> None:
    polls = Polls(Gate("a"))
    gate = polls.gates[0]
    gate.takes(500.0)
    polls.now += 1.0
    replica = gate.found(polls.now)
    for _ in range(3):
        polls.ledger.book(polls.now, [replica])
        polls.now += 1.0
    assert polls.ledger.flow(SHORT_S).arrivals == 1


def test_an_answer_that_comes_late_is_not_booked_behind_a_newer_one() -> None:
    polls = Polls(Gate("a"))
    gate = polls.gates[0]
    late = gate.found(polls.now)
    polls.poll(POLL_S, requests=10)
    polls.ledger.book(polls.now + 1.0, [late])
    polls.poll(POLL_S, requests=10)
    assert polls.ledger.flow(SHORT_S).arrivals == 20


def test_estimates_are_corrected_by_what_they_proved_to_be() -> None:
    polls = Polls(Gate("a"))
    polls.poll(SHORT_S, work=500.0, proves=0.5)
    assert polls.ledger.flow(SHORT_S).work_per_s == pytest.approx(50.0)


def test_what_was_true_long_ago_corrects_nothing_while_enough_is_served_now() -> None:
    gate = Gate("a", began_at=-3600.0)
    gate.takes(1e9, proves=10.0)
    polls = Polls(gate)
    polls.poll(SHORT_S, work=500.0, proves=0.5)
    assert polls.ledger.flow(SHORT_S).work_per_s == pytest.approx(50.0)


def test_what_was_refused_is_corrected_like_what_was_served() -> None:
    gate = Gate("a")
    polls = Polls(gate)
    for _ in range(6):
        polls.poll(POLL_S, work=500.0, proves=0.5)
        gate.counts = replace(gate.counts, work_offered=gate.counts.work_offered + 1500.0)
    polls.book()
    polls.poll(POLL_S)
    offered = 0.5 * (6 * 500.0 + 6 * 1500.0)
    assert polls.ledger.flow(LONG_S).work_per_s * polls.ledger.flow(LONG_S).span_s == pytest.approx(offered)


def test_too_little_served_corrects_by_all_that_is_remembered() -> None:
    gate = Gate("a", began_at=-3600.0)
    gate.takes(100 * ENOUGH_TO_CORRECT, proves=0.25)
    polls = Polls(gate)
    gate.counts = replace(gate.counts, work_offered=gate.counts.work_offered + 400.0)
    polls.poll(POLL_S)
    assert polls.ledger.flow(SHORT_S).work_per_s == pytest.approx(0.25 * 400.0 / POLL_S, rel=0.01)


def test_only_want_of_room_turns_away() -> None:
    gate = Gate("a")
    gate.counts = replace(gate.counts, evicted={"client_gone": 100, "drained": 100})
    polls = Polls(gate)
    polls.poll(SHORT_S, requests=10, refused=3)
    assert polls.ledger.flow(SHORT_S).turned_away_share == pytest.approx(0.3)
    gate.counts = replace(gate.counts, evicted={"client_gone": 200, "drained": 200, "deadline": 12})
    polls.now += 1.0
    polls.book()
    assert polls.ledger.flow(SHORT_S + 1.0).turned_away == 18 + 12


def test_what_was_turned_away_before_the_replicas_grew_says_nothing_about_them() -> None:
    polls = Polls(Gate("a"))
    polls.poll(SHORT_S, requests=10, refused=3)
    polls.gates.append(Gate("b", began_at=polls.now))
    polls.book()
    assert polls.ledger.grew_at == polls.now
    polls.poll(10.0, requests=10)
    lately = polls.ledger.flow(SHORT_S, since=polls.ledger.grew_at)
    assert (lately.span_s, lately.turned_away) == (10.0, 0.0)


def test_pressed_is_a_share_of_the_ready_replicas_time() -> None:
    first, second = Gate("a"), Gate("b")
    polls = Polls(first, second)
    for _ in range(6):
        first.pressed_s += POLL_S
        polls.poll(POLL_S)
    assert polls.ledger.flow(SHORT_S).pressed_share == pytest.approx(0.5)


def test_capacity_is_the_mean_by_measured_time_and_outlives_its_pods() -> None:
    first, second = Gate("a"), Gate("b")
    first.capacity = CapacityReport(work_per_s=100.0, pressed_s=10.0, ended=9.0, age_s=0.0)
    second.capacity = CapacityReport(work_per_s=200.0, pressed_s=30.0, ended=9.0, age_s=0.0)
    polls = Polls(first, second, Gate("c"))
    assert polls.ledger.capacity_per_s == pytest.approx(175.0)
    polls.gates = [Gate("d")]
    polls.poll(LONG_S)
    assert polls.ledger.capacity_per_s == pytest.approx(175.0)
    assert Polls(Gate("e")).ledger.capacity_per_s is None


def test_the_fleet_is_told_by_what_is_known_of_each() -> None:
    silent, ungated = Gate("b"), Gate("c")
    silent.answers = False
    ungated.gated = ungated.answers = False
    starting = Gate("d", state=ReplicaState.STARTING)
    starting.answers = False
    leaving = Gate("e", state=ReplicaState.LEAVING)
    polls = Polls(Gate("a"), silent, ungated, starting, leaving)
    assert polls.ledger.fleet == Fleet(ready=3, starting=1, leaving=1, silent=1, ungated=1)
    assert polls.ledger.fleet.current == 4


def test_a_report_is_fresh_for_a_while() -> None:
    gate = Gate("a")
    polls = Polls(gate)
    gate.answers = False
    polls.poll(FRESH_S)
    assert polls.ledger.fleet.silent == 0
    polls.poll(POLL_S)
    assert polls.ledger.fleet.silent == 1


def test_what_waits_is_of_the_gates_that_are_there() -> None:
    first, second = Gate("a"), Gate("b")
    first.waiting, second.waiting = 100.0, 20.0
    polls = Polls(first, second)
    assert polls.ledger.work_waiting == 120.0
    del polls.gates[0]
    polls.poll(POLL_S)
    assert polls.ledger.work_waiting == 20.0


def test_pods_and_polls_do_not_pile_up() -> None:
    polls = Polls()
    for number in range(500):
        polls.gates = [Gate(f"pod {number}", began_at=polls.now)]
        polls.now += 1.0
        polls.book()
    assert len(polls.ledger._entries) <= MAX_ENTRIES
    assert len(polls.ledger._seen) <= LONG_S + 1
