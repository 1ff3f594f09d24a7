"""Rounds: every target once a round, back to back, in an order that turns round each time.

What drifts on a machine (clock speed, neighbours) drifts over all targets of a round alike, and what the order
favours it favours one way as often as the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Final

from sluicegate_lab.bench.bars import DIRECT, SUBJECT
from sluicegate_lab.bench.loads import Sample, Target

#: A client busier than this may limit what it measures.
CLIENT_LIMIT: Final = 0.9

Say = Callable[[str], None]


def interleave(
    title: str, load: Callable[[Target], Sample], targets: Sequence[Target], rounds: int, say: Say
) -> dict[str, list[Sample]]:
    """Run the load against each target in each round; returns the samples by target, in order of the rounds."""
    samples: dict[str, list[Sample]] = {target.name: [] for target in targets}
    for turn in range(rounds):
        for target in targets if turn % 2 == 0 else reversed(targets):
            samples[target.name].append(load(target))
        say(f"{title}: round {turn + 1} of {rounds}; {_line(samples)}")
    for remark in saturation(title, samples):
        say(remark)
    say(conditions(title, samples))
    return samples


def _line(samples: dict[str, list[Sample]]) -> str:
    parts = []
    for name, column in samples.items():
        if column:
            key, value = next(iter(column[-1].values.items()))
            if value:
                parts.append(f"{name} {value:.0f} {key.rpartition('_')[2]}")
            else:
                parts.append(name)
    return ", ".join(parts)


def saturation(title: str, samples: dict[str, list[Sample]]) -> list[str]:
    """A remark for each target that the client may have held back."""
    return [
        f"{title}: the client was {busy:.0%} busy against {name}: it may limit what is measured"
        for name, column in samples.items()
        if (busy := max((sample.conditions.client_busy for sample in column), default=0.0)) > CLIENT_LIMIT
    ]


def conditions(title: str, samples: dict[str, list[Sample]]) -> str:
    """How busy both sides were at most, and how much of their core others took from the proxies."""
    every = [sample for column in samples.values() for sample in column]
    client = max(sample.conditions.client_busy for sample in every)
    subject = max((sample.conditions.proxy_busy for sample in samples[SUBJECT]), default=0.0)
    waited = median(
        sample.conditions.proxy_waited
        for name, column in samples.items()
        if name != DIRECT
        for sample in column
    )
    return (
        f"{title}: client and engine stub at most {client:.0%} busy, the subject {subject:.0%}; "
        f"proxies waited for their core {waited:.0%} of the time"
    )
