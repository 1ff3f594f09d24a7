"""`sluicegate check FILE...`: everything that is wrong with a policy, or everything that it means.

A wrong policy gives a line for each problem; a right one a summary with every default filled in, and what is
accepted but does less than it may seem to. The reading is the gate's own, so that what passes here is what a
gate takes up.

Exit codes: 0 all policies are right, 2 at least one is not.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from sluicegate_core.durations import format_duration
from sluicegate_core.policy import ClassPolicy, EngineSpec, Policy, Rule, policy_warnings, write_spec
from sluicegate_sidecar.policy_file import (
    MAX_FILE_BYTES,
    PolicyFileError,
    read_bounded,
    read_policy,
    unreadable,
)

WRONG = 2

STDIN = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="a policy in YAML or JSON, a directory with a policy.yaml, or - for the standard input",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object for all files")


def run(args: argparse.Namespace) -> int:
    """Check each file and print what was found."""
    results = [(name, _read(name)) for name in args.files]
    if args.json:
        print(json.dumps({"files": [_as_json(name, result) for name, result in results]}, indent=2))
    else:
        print("\n\n".join(_as_text(name, result) for name, result in results))
    return WRONG if any(isinstance(result, PolicyFileError) for _, result in results) else 0


def _read(name: str) -> Policy | PolicyFileError:
    try:
        data = sys.stdin.buffer.read(MAX_FILE_BYTES + 1) if name == STDIN else read_bounded(Path(name))
        return read_policy(data, name)
    except OSError as error:
        return PolicyFileError(name, (unreadable(error),))
    except PolicyFileError as error:
        return error


def _as_json(name: str, result: Policy | PolicyFileError) -> dict[str, Any]:
    if isinstance(result, PolicyFileError):
        problems = [
            {"path": one.path, "value": one.value, "message": one.message, "fix": one.fix}
            for one in result.problems
        ]
        return {"file": name, "valid": False, "problems": problems}
    return {
        "file": name,
        "valid": True,
        "spec": write_spec(result),
        "warnings": list(policy_warnings(result)),
    }


def _as_text(name: str, result: Policy | PolicyFileError) -> str:
    if isinstance(result, PolicyFileError):
        return str(result)
    warnings = [f"{name}: warning: {warning}" for warning in policy_warnings(result)]
    return "\n".join([f"{name}: a valid policy", *_summary(result), *warnings])


def _summary(policy: Policy) -> list[str]:
    """What is in force under the policy, in lines."""
    default, rules = policy.classify.default, policy.classify.rules
    lines = [f"  mode      {policy.mode}", f"  engine    {_engine(policy.engine)}", "  classes"]
    rows: list[tuple[str, ...]] = [
        ("", "TTFT", "inter-token", "weight", "queue time", "concurrency", "reserved slots")
    ]
    rows += [_class_row(one) for one in policy.classes]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += [
        ("    " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]
    lines.append("  classify")
    lines += [f"    {_rule(rule)} -> {rule.class_name}" for rule in rules]
    lines.append(f"    {'everything else' if rules else 'everything'} -> {default}")
    header = policy.classify.client_header
    named = f"header {header}, else " if header else ""
    lines.append(f"  clients   {named}the fairness headers of gateways, else the key, else anonymous")
    if policy.autoscaling is not None:
        scaling = policy.autoscaling
        most = "any number" if scaling.max_replicas is None else scaling.max_replicas
        start = "measured" if scaling.cold_start_s is None else format_duration(scaling.cold_start_s)
        lines.append(
            f"  replicas  {scaling.min_replicas} to {most}, by {scaling.provider}, cold start {start}"
        )
    return lines


def _engine(engine: EngineSpec) -> str:
    parts = [
        "type found out" if engine.type == "Auto" else str(engine.type),
        "port found out" if engine.port is None else f"port {engine.port}",
        "slots found out" if engine.slots is None else f"{engine.slots} slots",
    ]
    parts += [f"health at {engine.health_path}"] if engine.health_path else []
    parts += [f"metrics at {engine.metrics_path}"] if engine.metrics_path else []
    return ", ".join(parts)


def _class_row(one: ClassPolicy) -> tuple[str, ...]:
    return (
        one.name,
        "none" if one.slo.ttft_s is None else format_duration(one.slo.ttft_s),
        "none" if one.slo.itl_s is None else format_duration(one.slo.itl_s),
        str(one.weight),
        format_duration(one.max_queue_time_s),
        "no cap" if one.max_concurrency is None else str(one.max_concurrency),
        "sized by the gate" if one.reserved_slots is None else str(one.reserved_slots),
    )


def _rule(rule: Rule) -> str:
    if rule.header is not None:
        return f"{rule.header}: {' or '.join(rule.values)}"
    return f"model {rule.model}" if rule.model is not None else f"path {rule.path}"
