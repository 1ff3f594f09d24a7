"""The loops that tests with real sockets run on: the data path's on both, all others on the one that is used."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, LoopFactory]:
    """uvloop, and for `test_http_*` plain asyncio too: the data path promises to run on either."""
    if item.path.name.startswith("test_http_"):
        return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
    return {"uvloop": uvloop.new_event_loop}
