"""Fixtures of all tests; async tests run on plain asyncio, GPU tests are skipped where there is no GPU."""

import asyncio
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

# Servers and callers of a test share few cores: threads of OpenMP must not keep them busy while idle.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from tests.callers import AsyncCaller, Caller, Connect
from tests.expertd import RunningServer, channels_in, running_server
from tests.waiting import wait_for


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of a pool that are chosen at random are the first ones."""
    chance = SimpleNamespace(choice=lambda given: given[0], sample=lambda given, count: given[:count])
    monkeypatch.setattr("expertd_client.pool.random", chance)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """`expertd serve` with a small layer, for tests that do not end it."""
    with running_server(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="session")
def lasting_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The server of `sharing_server`."""
    directory = tmp_path_factory.mktemp("sharing")
    with running_server(directory, channels_in(directory)) as running:
        yield running


@pytest.fixture
def sharing_server(lasting_server: RunningServer) -> RunningServer:
    """A server with channels, none of which is open, for tests that do not end it."""
    wait_for(lambda: not lasting_server.channels(), "the server closes the channels of the test before")
    return lasting_server


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RunningServer]:
    """As `sharing_server`, for a test that ends it."""
    with running_server(tmp_path, channels_in(tmp_path)) as running:
        yield running


@pytest.fixture(params=["sync", "async"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Makes clients of either kind, closed after the test; they use HTTP unless the test says otherwise."""
    make = Caller if request.param == "sync" else AsyncCaller
    made: list[Caller | AsyncCaller] = []

    def connected(url: str, **options: object) -> Caller | AsyncCaller:
        made.append(make(url, **{"transport": "http", **options}))
        return made[-1]

    yield connected
    for caller in made:
        caller.end()
