"""Writes the dashboard and the rules into the chart: `python -m sluicegate_operator.observability [FOLDER]`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import yaml

from sluicegate_operator.observability.dashboard import dashboard_json
from sluicegate_operator.observability.rules import groups

HEADER: Final = "# Made by `python -m sluicegate_operator.observability`: do not edit.\n"


def files() -> dict[str, str]:
    """Path within the chart -> content."""
    rules = yaml.safe_dump({"groups": groups()}, sort_keys=False, width=110, allow_unicode=True)
    return {"dashboards/sluicegate.json": dashboard_json(), "rules/sluicegate.yaml": HEADER + rules}


def main(arguments: list[str]) -> int:
    """Write them below the chart's folder, by default `charts/sluicegate`."""
    chart = Path(arguments[0] if arguments else "charts/sluicegate")
    for name, content in files().items():
        path = chart / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
