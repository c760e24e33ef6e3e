"""One heap for all threads of a process, and imports without collections."""

import gc
import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest

from expertd.service.util.heap import quick_imports
from tests.service.processes import clean_environment

PROGRAM = """
import ctypes, os, tempfile, threading
from expertd.service.util.heap import give_back_freed, share_heap

share_heap()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
libc.fdopen.restype = ctypes.c_void_p
libc.fdopen.argtypes = [ctypes.c_int, ctypes.c_char_p]
libc.fclose.argtypes = [ctypes.c_void_p]
allocated = threading.Barrier(4)

def allocate():
    libc.malloc(10_000)
    allocated.wait()

threads = [threading.Thread(target=allocate) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
with tempfile.TemporaryFile() as file:
    stream = libc.fdopen(os.dup(file.fileno()), b"w")
    assert libc.malloc_info(0, stream) == 0
    libc.fclose(stream)
    file.seek(0)
    print(file.read().count(b"<heap nr="))
give_back_freed()
"""


@pytest.mark.parametrize(("variables", "most"), [({}, 1), ({"MALLOC_ARENA_MAX": "3"}, 3)])
def test_threads_share_a_heap_unless_the_environment_says_otherwise(
    variables: Mapping[str, str], most: int
) -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        command, env=clean_environment(**variables), capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == most


@pytest.fixture
def unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()


def collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())


@pytest.mark.usefixtures("unfrozen")
def test_nothing_is_collected_during_imports_nor_what_they_made_afterwards() -> None:
    with quick_imports():
        before = collections()
        made = [[index] for index in range(100_000)]
        assert collections() == before
    assert gc.get_freeze_count() > len(made)
    del made
    more = [[index] for index in range(100_000)]
    assert collections() > before
    assert len(more) == 100_000


@pytest.mark.usefixtures("unfrozen")
def test_an_import_that_fails_leaves_the_collector_enabled() -> None:
    with pytest.raises(ImportError), quick_imports():
        raise ImportError
    assert gc.isenabled()
