"""What holds for all tests: generated examples have no deadline, and in CI they are the same each time; the root
logger is after a test what it was before.

A deadline would be a timed test. Elsewhere than in CI examples are new with each run; a failure prints how to
replay it.
"""

import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("here", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A process under test that configures logging would leave later tests a handler on a closed stream."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        return (yield)
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers
