"""Files of Unix sockets: who may replace and remove them."""

import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from expertd.service.util.socket_files import SocketFile, listen_at


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "socket"


def bound(stack: ExitStack, path: Path) -> socket.socket:
    made = stack.enter_context(socket.socket(socket.AF_UNIX))
    made.bind(str(path))
    return made


def test_the_file_of_another_server_stays(path: Path) -> None:
    """Also if it has got the same inode."""
    with ExitStack() as stack:
        first = bound(stack, path)
        file = SocketFile(path)
        first.close()
        path.unlink()
        time.sleep(0.02)  # files have the time of the last tick
        bound(stack, path)
        file.remove()
        assert path.is_socket()


def test_a_file_that_is_gone_is_no_error(path: Path) -> None:
    with ExitStack() as stack:
        bound(stack, path)
        file = SocketFile(path)
        path.unlink()
        file.remove()


def listen(path: Path, together: threading.Barrier, stack: ExitStack, refused: list[str]) -> None:
    together.wait()
    try:
        made, file = listen_at(path, 1)
    except OSError as error:
        refused.append(str(error))
    else:
        stack.callback(file.remove)
        stack.enter_context(made)


def test_of_two_that_find_a_dead_socket_one_listens(path: Path) -> None:
    for _ in range(100):
        with ExitStack() as stack:
            bound(stack, path).close()
            refused: list[str] = []
            arguments = (path, threading.Barrier(2), stack, refused)
            threads = [threading.Thread(target=listen, args=arguments) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            (why,) = refused
            assert why.endswith("on which another server listens")
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.connect(str(path))
