"""`python -m sluicegate_lab` is `sluicegate`."""

from sluicegate_lab.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
