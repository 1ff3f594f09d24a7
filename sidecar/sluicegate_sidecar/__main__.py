"""`python -m sluicegate_sidecar run ...`: the gate, without the rest of the command line."""

import sys
from collections.abc import Sequence

from sluicegate_sidecar.run import main as run


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of the gate's image; the word `run` may be left out."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    return run(given[1:] if given[:1] == ["run"] else given)


if __name__ == "__main__":
    raise SystemExit(main())
