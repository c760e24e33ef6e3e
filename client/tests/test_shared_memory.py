"""What only shared memory does: regions come and go, on both sides."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from expertd_client import ExpertClient, TransportUnavailableError
from expertd_client.shared_memory import files
from tests.callers import Connect
from tests.expertd import HIDDEN, MODEL, RunningServer, running_server

X = np.random.default_rng(15).standard_normal((5, HIDDEN), dtype=np.float32)
slow = pytest.mark.slow  # a server process


def our_files(process: int | None = None) -> set[Path]:
    """Those of `process`, None: this one; other tests may run beside it."""
    return set(files.FOLDER.glob(f"expertd-client-{process or os.getpid()}-*"))


@slow
def test_one_region_serves_all_sizes_and_goes_with_the_client(
    connect: Connect, sharing_server: RunningServer
) -> None:
    before = our_files()
    client = connect(sharing_server.url, transport="shared_memory")
    for size in (1, 5, 600, 3, 700):
        client.infer(MODEL, np.ones((size, HIDDEN), np.float32))
    assert len(our_files() - before) == 1
    assert len(sharing_server.regions()) == 1
    client.close()
    assert our_files() == before
    assert sharing_server.regions() == []


@slow
def test_a_region_that_the_server_has_freed_is_registered_again(
    connect: Connect, sharing_server: RunningServer
) -> None:
    """As it does with regions that nobody has used for a while."""
    client = connect(sharing_server.url, transport="shared_memory")
    expected = client.infer(MODEL, X)
    for _ in range(2):
        sharing_server.ask("/v2/systemsharedmemory/unregister", "POST")
        np.testing.assert_array_equal(client.infer(MODEL, X), expected)
    client.close()
    assert sharing_server.regions() == []


@slow
@pytest.mark.parametrize("prefix", ["theirs-", "it's"])
def test_a_server_that_allows_other_names_only(
    connect: Connect, tmp_path: Path, caplog: pytest.LogCaptureFixture, prefix: str
) -> None:
    """Its error names the prefix, which the client uses unless it has unusual characters."""
    before = our_files()
    settings = ["shared_memory.enabled=true", f"shared_memory.key_prefix={prefix}"]
    with running_server(tmp_path, *settings) as server:
        client = connect(server.url, transport="auto")
        assert client.infer(MODEL, X).shape == X.shape
        if prefix == "theirs-":
            assert client.client.transport == "shared_memory"
            assert len(list(files.FOLDER.glob(f"theirs-expertd-client-{os.getpid()}-*"))) == 1
            client.close()
            assert not list(files.FOLDER.glob(f"theirs-expertd-client-{os.getpid()}-*"))
        else:
            assert client.client.transport == "http"
            with pytest.raises(TransportUnavailableError, match=r"shared_memory\.key_prefix"):
                connect(server.url, transport="shared_memory").infer(MODEL, X)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (prefix != "theirs-")
    assert our_files() == before


@slow
def test_auto_takes_it_if_there_are_no_channels(
    connect: Connect, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running_server(tmp_path, "shared_memory.enabled=true") as server:
        client = connect(server.url, transport="auto")
        assert client.infer(MODEL, X).shape == X.shape
        assert client.client.transport == "shared_memory"
        client.close()
    assert [record.levelname for record in caplog.records if record.levelname == "WARNING"] == []


@slow
def test_calls_beyond_the_servers_memory_go_over_http(
    connect: Connect, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ["shared_memory.enabled=true", "shared_memory.max_bytes=1000000"]
    with running_server(tmp_path, *settings) as server:
        client = connect(server.url, transport="auto")
        for _ in range(2):
            assert client.infer(MODEL, np.ones((600, HIDDEN), np.float32)).shape == (600, HIDDEN)
            assert client.infer(MODEL, X).shape == X.shape
        assert client.client.transport == "shared_memory"
        client.close()
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("transport shared_memory: byte_size: expected at most shared_memory.max_bytes")


@slow
def test_memory_that_the_system_does_not_have(
    sharing_server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """/dev/shm of a container has 64 MB: found out before it is written to, and the call goes over HTTP."""
    before = our_files()

    def full(*arguments: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with ExpertClient(sharing_server.url, transport="shared_memory") as client:
        client._choice._is_free = True  # as with auto
        assert client.infer(MODEL, X).shape == X.shape
        assert client.transport == "shared_memory"  # the next call may have room
    assert "No space left on device; taking http for this call" in caplog.text
    assert our_files() == before


@slow
def test_memory_that_is_asked_for_and_that_the_system_does_not_have(
    connect: Connect, sharing_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    client = connect(sharing_server.url, transport="shared_memory")
    for _ in range(2):
        with pytest.raises(
            TransportUnavailableError, match=r"^shared memory: expected \d+ bytes in /dev/shm"
        ):
            client.infer(MODEL, X)


EXIT = """
import os, sys
import numpy as np
from expertd_client import ExpertClient

client = ExpertClient(sys.argv[1], transport="shared_memory")
client.infer("demo", np.ones((5, 512), np.float32))
print(os.getpid())
sys.exit("no close")
"""


@slow
def test_a_process_that_ends_without_closing_removes_its_file(sharing_server: RunningServer) -> None:
    path = ":".join(entry for entry in sys.path if entry)
    program = [sys.executable, "-c", EXIT, sharing_server.url]
    done = subprocess.run(program, env={"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.stderr == "no close\n"
    assert our_files(int(done.stdout)) == set()
    sharing_server.ask("/v2/systemsharedmemory/unregister", "POST")


def test_a_file_is_new_private_and_whole() -> None:
    file = files.SharedFile(1 << 20)
    path = files.FOLDER / file.key
    status = path.stat()
    assert (status.st_size, status.st_blocks * 512, status.st_mode & 0o777) == (1 << 20, 1 << 20, 0o600)
    file.data[:] = 7
    assert path.read_bytes() == bytes([7]) * (1 << 20)
    file.close()
    file.close()
    assert not path.exists()
    assert file.data[-1] == 7
