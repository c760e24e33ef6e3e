"""Skips GPU tests if, and only if, there is no Hopper GPU; saves the time of idle threads and old objects."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Servers, ranks and callers of a test share few cores: threads of OpenMP must not keep them busy while idle.
# Read when torch is imported, here and in every process that a test starts.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

# Read when kernels in Triton are imported: without a GPU, tests have them interpreted.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import expertd.service.grpc  # noqa: F401 - before a test imports grpc: it turns its handlers of fork() off


def pytest_configure(config: pytest.Config) -> None:
    """A test of Hypothesis may take as long as it does on a busy machine.

    Processes of xdist share the cores: more threads would only wait for each other.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
    if config.pluginmanager.hasplugin("hypothesispytest"):
        from hypothesis import settings  # not where only GPU tests run

        settings.register_profile("no deadline", deadline=None)
        settings.load_profile("no deadline")


# Tests of tools, and of the documents' site.
THOROUGH = ("tests/benchmarks/", "tests/site/", "tests/soak/")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without these, their imports are spared: matplotlib, transformers, playwright."""
    folders = [config.rootpath / folder for folder in THOROUGH]
    return ("not thorough" in config.option.markexpr and collection_path in folders) or None


MANY_MODULES = 50  # of a file's own imports
MANY_DESCRIPTORS = 250  # select() takes none from 1024 on


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(THOROUGH):
            item.add_marker(pytest.mark.thorough)
    slow = {item.path for item in items if {"slow", "thorough"} & set(item.keywords)}
    # Otherwise one process is still running them after the others have finished.
    items.sort(key=lambda item: item.path not in slow)
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a GPU of compute capability 9.0"))


def pytest_collection() -> None:
    """As in a server, the garbage collector never searches what imports make: it would take half a second."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> Iterator[None]:
    """Searches of the garbage collector skip what a file's tests import: for transformers, 0.1 seconds."""
    before = len(sys.modules)
    yield
    if len(list(Path("/proc/self/fd").iterdir())) > MANY_DESCRIPTORS:
        forget_servers()
    if len(sys.modules) > before + MANY_MODULES:
        gc.collect()
        gc.freeze()


def forget_servers() -> None:
    """FastAPI keeps what it has found out about endpoints, and so the engines of servers that have ended."""
    from fastapi.dependencies import models

    for each in vars(models).values():
        if hasattr(each, "cache_clear"):
            each.cache_clear()
    gc.collect()
