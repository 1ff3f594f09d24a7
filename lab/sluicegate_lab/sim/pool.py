"""Many simulations at once, over the cores of the machine. Results come in the order of the tasks."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor

from sluicegate_lab.sim.measures import Measures
from sluicegate_lab.sim.scenarios import Case, Contender, play

Task = tuple[Case, Contender]


def play_all(
    tasks: Sequence[Task], *, said: Callable[[int], None], workers: int | None = None
) -> list[Measures]:
    """Play each task. `said` is told how many are done.

    Args:
        workers: processes; None: one a core.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(workers or cores, len(tasks))
    results: list[Measures] = []
    if workers <= 1:
        for case, contender in tasks:
            results.append(play(case, contender))
            said(len(results))
        return results
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        for measures in pool.map(play, *zip(*tasks, strict=True), chunksize=4):
            results.append(measures)
            said(len(results))
    return results
