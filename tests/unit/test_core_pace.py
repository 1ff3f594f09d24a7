"""Inter-token pacing: the measured gap against an exact one, what pauses the line, and what lets it run again."""

import math
import random

import pytest
from tests.simulation.world import EngineModel, Job, World, poisson_jobs

from sluicegate_core.engine import EngineView
from sluicegate_core.pace import LOOK_EVERY_S, SAFETY, SAMPLE_EVERY_S, SLOS_A_WINDOW, WINDOW_S, Pace
from sluicegate_core.policy import ClassPolicy, Policy, Slo
from sluicegate_core.request import Request
from sluicegate_core.vocabulary import Hold


class Watched(Pace):
    """A pace beside an engine whose requests are the pace's own residents."""

    def __init__(self, *itl_s: float | None) -> None:
        self.view = EngineView(len(itl_s), None)
        super().__init__(
            Policy(classes=tuple(ClassPolicy(f"c{i}", Slo(itl_s=s)) for i, s in enumerate(itl_s))), self.view
        )

    def enter(self, now: float, class_index: int) -> None:
        self.view.running += 1
        self.view.running_of[class_index] += 1
        super().enter(now, class_index)

    def leave(self, now: float, class_index: int) -> None:
        self.view.running -= 1
        self.view.running_of[class_index] -= 1
        super().leave(now, class_index)


def exact_gap_s(
    entered: list[float],
    tokens: list[float],
    now: float,
    window_s: float,
    left: dict[int, float] | None = None,
) -> float:
    """Decayed stream time over decayed tokens, each from its definition: an integral and a sum."""
    stream_s = 0.0
    for i, at in enumerate(entered):
        until = (left or {}).get(i, now)
        stream_s += window_s * (math.exp((until - now) / window_s) - math.exp((at - now) / window_s))
    return stream_s / sum(math.exp((t - now) / window_s) for t in tokens)


@pytest.mark.parametrize("gap_s", [0.01, 0.05, 0.12])
@pytest.mark.parametrize("streams", [1, 7])
def test_the_gap_of_steady_streams(gap_s: float, streams: int) -> None:
    pace = Watched(0.05)
    for i in range(streams):
        pace.enter(10.0 + 0.001 * i, 0)
    steps = int(4.0 / gap_s)
    for n in range(1, steps + 1):
        for i in range(streams):
            pace.fresh[0] += 1
            pace.advance(10.0 + 0.001 * i + n * gap_s)
    assert pace.gap_s(0) == pytest.approx(gap_s, rel=0.15)


def test_the_gap_of_irregular_streams_is_the_decayed_time_over_the_decayed_tokens() -> None:
    rng = random.Random(4)
    pace = Watched(0.05)
    entered, left, tokens = [], {}, []
    now = 0.0
    for step in range(3_000):
        now += rng.expovariate(400.0)
        if step % 150 == 0:
            pace.enter(now, 0)
            entered.append(now)
        elif step % 301 == 0:
            pace.leave(now, 0)
            left[len(left)] = now
        else:
            pace.fresh[0] += 1
            tokens.append(now)
            if rng.random() < 0.5:
                pace.advance(now)
        if step > 300 and step % 100 == 0:
            pace.advance(now)
            measured = pace.gap_s(0)
            assert measured is not None
            assert measured == pytest.approx(exact_gap_s(entered, tokens, now, WINDOW_S, left), rel=0.05)


def test_a_stalled_stream_is_counted_by_the_time_it_waits() -> None:
    """Nine streams run, one stands still: the mean says so within a window; and if all stand still, at once."""
    pace = Watched(0.05)
    for _ in range(10):
        pace.enter(0.0, 0)
    now = 0.0
    for _ in range(100):
        now += 0.02
        pace.fresh[0] += 9
        pace.advance(now)
    assert pace.gap_s(0) == pytest.approx(0.02 * 10 / 9, rel=0.1)
    assert pace.hold(now) is None
    now += 0.3
    assert pace.hold(now) is Hold.GAP


@pytest.mark.parametrize("slo_s", [0.02, 0.1, 0.3, 1.0, 5.0])
def test_one_stream_that_stalls_is_seen_whatever_the_slo(slo_s: float) -> None:
    pace = Watched(slo_s)
    pace.enter(0.0, 0)
    now = 0.0
    for _ in range(20):
        now += slo_s / 2
        pace.fresh[0] += 1
        pace.advance(now)
    assert pace.hold(now) is None
    assert pace.hold(now + SLOS_A_WINDOW * max(slo_s, WINDOW_S)) is Hold.GAP


@pytest.mark.parametrize(
    ("share", "held"), [(0.7, False), (SAFETY - 0.05, False), (SAFETY + 0.05, True), (1.5, True)]
)
def test_the_line_pauses_at_nine_tenths_of_the_slo(share: float, held: bool) -> None:
    slo_s = 0.05
    pace = Watched(slo_s)
    for _ in range(20):
        pace.enter(0.0, 0)
    now = 0.0
    for _ in range(100):
        now += slo_s * share
        pace.fresh[0] += 20
        pace.advance(now)
    assert (pace.hold(now) is Hold.GAP) is held


def test_nothing_is_held_while_nothing_is_known() -> None:
    pace = Watched(0.05)
    assert pace.hold(0.0) is None
    pace.enter(0.0, 0)
    assert pace.gap_s(0) is None
    assert pace.hold(0.0) is None
    assert pace.hold(0.04) is None  # less than its first gap may be


def test_classes_without_an_inter_token_slo_hold_nobody() -> None:
    pace = Watched(None, 0.05)
    for _ in range(5):
        pace.enter(0.0, 0)
    assert pace.hold(30.0) is None
    pace.enter(30.0, 1)
    assert pace.hold(31.0) is Hold.GAP  # the one with an SLO stands still


def test_the_line_runs_again_when_the_gap_has_recovered_or_the_slow_have_left() -> None:
    pace = Watched(0.05)
    for _ in range(3):
        pace.enter(0.0, 0)
    assert pace.hold(1.0) is Hold.GAP
    now = 1.0
    for _ in range(100):
        now += 0.01
        pace.fresh[0] += 3
        pace.advance(now)
    assert pace.hold(now) is None
    assert pace.hold(now + 1.0) is Hold.GAP
    for _ in range(3):
        pace.leave(now + 1.0, 0)
    assert pace.hold(now + 1.0) is None
    assert pace.residents == 0


def test_the_answer_stands_for_a_moment_and_ends_when_somebody_comes_or_goes() -> None:
    pace = Watched(0.05)
    pace.enter(0.0, 0)
    pace.enter(0.0, 0)
    assert pace.hold(1.0) is Hold.GAP
    pace.fresh[0] += 1_000
    assert pace.hold(1.0 + 0.9 * LOOK_EVERY_S) is Hold.GAP
    assert pace.hold(1.0 + 1.1 * LOOK_EVERY_S) is None
    assert pace.hold(4.0) is Hold.GAP
    pace.leave(4.0, 0)
    pace.leave(4.0, 0)
    assert pace.hold(4.0) is None


def run_at(pace: Watched, now: float, residents: int, gap_s: float, seconds: float) -> float:
    """So many residents for so long, sampled as the controller does."""
    while pace.residents < residents:
        pace.enter(now, 0)
    while pace.residents > residents:
        pace.leave(now, 0)
    until = now + seconds
    while now < until:
        now += gap_s
        pace.fresh[0] += residents
        if now >= pace.sample_due:
            pace.sample(now)
    return now


def learned(slo_s: float) -> tuple[Watched, float]:
    """10 ms and 2 ms a request, learned at batch sizes from 2 to 18."""
    pace = Watched(slo_s)
    now = 0.0
    for residents in (2, 5, 10, 14, 18, 8, 4, 12, 16):
        now = run_at(pace, now, residents, 0.010 + 0.002 * residents, 5.0)
    return pace, now


def test_the_curve_is_learned() -> None:
    pace, _ = learned(0.06)
    assert pace.curve.slope == pytest.approx(0.002, rel=0.15)
    assert pace.curve.intercept == pytest.approx(0.010, rel=0.3)


@pytest.mark.parametrize(("running", "held"), [(10, False), (19, False), (22, True), (40, True)])
def test_one_too_many_is_kept_out_before_anything_is_measured(running: int, held: bool) -> None:
    """10 ms + 2 ms x 22 is nine tenths of 60 ms. None of them has had a token: there is no gap to measure."""
    pace, now = learned(0.06)
    while pace.residents:
        pace.leave(now, 0)
    pace.view.running, pace.view.running_of[0] = running, running
    assert (pace.hold(now) is Hold.NEXT_GAP) is held


def test_a_curve_that_has_seen_one_batch_size_is_flat() -> None:
    pace = Watched(0.05)
    run_at(pace, 0.0, 1, 0.03, 60.0)
    assert pace.curve.known
    assert pace.next_gap_s() == pytest.approx(0.03, rel=0.02)


def test_the_look_ahead_is_for_the_sake_of_those_who_have_an_slo() -> None:
    pace = Watched(0.05, None)
    run_at(pace, 0.0, 3, 0.2, 10.0)
    for _ in range(3):
        pace.leave(20.0, 0)
    pace.enter(20.0, 1)
    assert pace.hold(20.0) is None


def test_prefill_and_silence_teach_the_curve_nothing() -> None:
    pace = Watched(0.05)
    pace.enter(0.0, 0)
    prompt = Request()
    pace.view.pending[prompt] = None
    for n in range(40):
        pace.fresh[0] += 5
        pace.sample(n * SAMPLE_EVERY_S)
    assert pace.curve.samples == 0
    del pace.view.pending[prompt]
    pace.leave(11.0, 0)
    for n in range(40):
        pace.sample(12.0 + n * SAMPLE_EVERY_S)
    assert pace.curve.samples == 0


def test_residents_move_with_a_change_of_policy() -> None:
    pace = Watched(0.05, 0.05)
    for index in (0, 0, 1):
        pace.enter(0.0, index)
    pace.fresh[0] += 2
    pace.view.reconfigure(1, [0, 0], None)
    pace.reconfigure(Policy(classes=(ClassPolicy("only", Slo(itl_s=0.02)),)), [0, 0])
    assert pace.residents == 3
    assert pace.fresh == [2]
    for _ in range(3):
        pace.leave(1.0, 0)
    assert pace.residents == 0
    assert pace.hold(1.0) is None


def test_a_clock_that_stands_still_or_steps_back_changes_nothing() -> None:
    pace = Watched(0.05)
    pace.enter(1.0, 0)
    for _ in range(50):
        pace.fresh[0] += 1
        pace.advance(1.0)
        pace.advance(0.999)
    pace.hold(0.9)
    pace.advance(1.5)
    gap_s = pace.gap_s(0)
    assert gap_s is not None
    assert gap_s >= 0.0


# Pausing does not freeze: in a world, with arrivals that go on.


def test_a_paused_line_goes_on_as_residents_leave() -> None:
    """The engine cannot hold the SLO with more than a few; the line is paced for a minute and never stands."""
    rng = random.Random(2)
    slow = EngineModel(base_s=0.020, per_stream_s=0.005, per_prompt_token_s=0.0001, slots=64)
    jobs = poisson_jobs(rng, rate=20.0, seconds=60.0, mix=[1.0], prompt=50.0, output=20.0)
    policy = Policy(classes=(ClassPolicy("c", Slo(ttft_s=2.0, itl_s=0.05)),))
    world = World(policy, slow, jobs, checked=False)
    report = world.run()
    # Five or six at once at 50 ms a token, twenty tokens each: five or six a second is what it can do.
    assert report.served[0] > 250
    assert report.good[0] > 0.9 * report.served[0]


def test_an_slo_that_even_one_stream_breaks_does_not_stop_the_engine() -> None:
    slow = EngineModel(base_s=0.200, slots=64)
    jobs = [Job(at=0.1 * i, class_index=0, prompt_tokens=10, output_tokens=5) for i in range(100)]
    policy = Policy(classes=(ClassPolicy("c", Slo(itl_s=0.05), max_queue_time_s=1_000.0),))
    report = World(policy, slow, jobs).run()
    assert report.served == [100]


def test_a_quiet_hour_with_single_streams_does_not_keep_the_next_burst_to_one() -> None:
    """With one resident only, the curve knows one point; it must not hold the batch size there."""
    engine = EngineModel(base_s=0.03, per_stream_s=0.0002, slots=64)
    jobs = [Job(at=4.0 * i, class_index=0, prompt_tokens=50, output_tokens=100) for i in range(30)]
    rng = random.Random(1)
    burst = poisson_jobs(rng, rate=8.0, seconds=60.0, mix=[1.0], prompt=50.0, output=100.0, start=120.0)
    policy = Policy(classes=(ClassPolicy("c", Slo(ttft_s=3.0, itl_s=0.05)),))
    report = World(policy, engine, [*jobs, *burst]).run()
    assert report.good[0] > 0.9 * (len(jobs) + len(burst))
