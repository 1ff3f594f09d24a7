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


@pytest.fixture(scope="session")
def gate_image() -> str:
    """The gate's image, as nodes of the cluster have it."""
    return _image("SLUICEGATE_TEST_GATE_IMAGE")


@pytest.fixture(scope="session")
def engine_image() -> str:
    """An image with a real llama.cpp (see `engines`), as nodes of the cluster have it."""
    return _image("SLUICEGATE_TEST_ENGINE_IMAGE")


@pytest.fixture(scope="session")
def operator_image() -> str:
    """The operator's image, as nodes of the cluster have it."""
    return _image("SLUICEGATE_TEST_OPERATOR_IMAGE")


def _image(variable: str) -> str:
    name = os.environ.get(variable)
    if name:
        return name
    pytest.skip(f"no image: set {variable}")
