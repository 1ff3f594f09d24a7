"""Tests against a real cluster: which one, and the mark by which they are chosen.

`SLUICEGATE_TEST_KUBECONFIG` names a cluster that the developer lends: its API server has to reach this machine by
the loopback address.
"""

import os
from pathlib import Path

import pytest

VARIABLE = "SLUICEGATE_TEST_KUBECONFIG"
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def kubeconfig() -> Path:
    """The kubeconfig of the cluster to test against."""
    path = os.environ.get(VARIABLE)
    if path:
        return Path(path)
    pytest.skip(f"no cluster: set {VARIABLE}")
