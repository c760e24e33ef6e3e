"""Starts processes of a server by a fork of one that has imported it: imports take seconds.

Such a process does what a new one does after its imports. It differs in the seed of hashes, which all have in
common, in limits of resources and variables that are read by imports, which are the fork server's, and in its
memory: use `subprocess` where that matters.
"""

import atexit
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import IO, NotRequired, TypedDict

import torch

from tests.paths import ROOT

CAN_FORK = not torch.cuda.is_available()  # servers on GPUs are tested with processes that are new
MAX_BYTES = 1 << 20  # of a request
MAX_DESCRIPTORS = 64

# Of the fork server: before tests change it, and without threads of OpenBLAS, which a fork would lose.
_ENVIRONMENT = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
_ROOM = " " * 400  # in the command line of the fork server, for that of a new process
_PR_SET_CHILD_SUBREAPER = 36
_ANSWER_SECONDS = 500.0  # of the fork server, which may have to import torch first
# Modules that start processes.
_STARTING = ("expertd.service.ranks.front.rank", "expertd.service.http.workers")


class Request(TypedDict):
    """What a process is started with. Descriptors are sent along, and get these `numbers`.

    imports  the fork server's, instead of a process
    """

    imports: NotRequired[list[str]]
    program: list[str]
    environment: dict[str, str]
    numbers: list[int]
    process_group: int | None
    has_children: bool


class ForkedProcess:
    """What the server and its tests use of subprocess.Popen, for a program in Python.

    has_children  whether it starts ranks or HTTP processes, which are forked, too
    """

    def __init__(
        self,
        args: Sequence[str | Path],
        stdin: int | IO[bytes] = subprocess.DEVNULL,
        stdout: IO[bytes] | None = None,
        stderr: IO[bytes] | None = None,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        process_group: int | None = None,
        has_children: bool = False,
    ) -> None:
        self.args = list(map(str, args))
        self.returncode: int | None = None
        self._lock = threading.Lock()
        names_python = self.args[0] == sys.executable
        with Path(os.devnull).open("rb") as nothing:
            given = (nothing if isinstance(stdin, int) else stdin, stdout, stderr)
            descriptors = {own: own if file is None else file.fileno() for own, file in enumerate(given)}
            descriptors.update({number: number for number in pass_fds})
            request = Request(
                program=self.args[1:] if names_python else self.args,
                environment=dict(os.environ if env is None else env),
                numbers=list(descriptors),
                process_group=process_group,
                has_children=has_children,
            )
            self.pid = _server.fork(request, list(descriptors.values()))
        self._end = os.pidfd_open(self.pid)  # readable from then on
        weakref.finalize(self, os.close, self._end)

    def poll(self) -> int | None:
        """The exit code, negative after a signal; None while it runs."""
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended. Raises subprocess.TimeoutExpired."""
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        poll.poll(None if timeout is None else max(0.0, 1000 * timeout))
        if (code := self.poll()) is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it ends meanwhile
                signal.pidfd_send_signal(self._end, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def fork_children(server: socket.socket | None = None) -> None:
    """From now on, fork the ranks and HTTP processes of this process: by `server`, None: by a new one."""
    if server is not None:
        server.settimeout(_ANSWER_SECONDS)
    _server.connection = server
    for name in _STARTING:
        module = import_module(name)
        vars(module)["subprocess"] = SimpleNamespace(**{**vars(subprocess), "Popen": ForkedProcess})


def import_first(*names: str) -> None:
    """Import modules before any further fork, for processes that would each need seconds for them."""
    if CAN_FORK:
        nothing = Request(program=[], environment={}, numbers=[], process_group=None, has_children=False)
        _server.fork({**nothing, "imports": list(names)}, [])


class _Server:
    """The fork server of this process, started by its first fork."""

    def __init__(self) -> None:
        self.connection: socket.socket | None = None
        self._lock = threading.Lock()

    def fork(self, request: Request, descriptors: Sequence[int]) -> int:
        """The id of a new child of this process."""
        with self._lock:
            if self.connection is None:
                self.connection = self._start()
            _adopt(True)
            try:
                socket.send_fds(self.connection, [json.dumps(request).encode()], descriptors)
                answer = self.connection.recv(100)
            except TimeoutError:
                self.connection.close()  # an answer that is late must not be that to the next request
                self.connection = None
                raise
            finally:
                _adopt(False)
        if not answer:
            raise OSError("the fork server has ended")
        return int(answer)

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(_ANSWER_SECONDS)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.service.fork_server", str(theirs.fileno()), _ROOM],
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env=_ENVIRONMENT,
                pass_fds=(theirs.fileno(),),
                process_group=0,  # Ctrl-C is for pytest
            )

        def end() -> None:
            ours.close()
            process.wait()

        atexit.register(end)
        return ours


_server = _Server()


def _adopt(orphans: bool) -> None:
    """Whether this process becomes the parent of processes below it whose own parent ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(orphans), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
