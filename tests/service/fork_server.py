"""A process that has imported the server and forks on request: `python -m ...fork_server DESCRIPTOR`.

The answer to a request is the id of a new process: a child of the caller, if the caller is a subreaper.
"""

import atexit
import fcntl
import gc
import json
import os
import runpy
import signal
import site
import socket
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

if __name__ == "__main__":
    atexit.register(lambda: _end())  # before all others, as the last is called first

import torch

from tests.service.forking import MAX_BYTES, MAX_DESCRIPTORS, Request, fork_children

_IMPORTS = (
    "expertd.kernels.backends.reference.backend",
    "expertd.service.checkpoints",
    "expertd.service.cli",
    "expertd.service.commands.serve",
    "expertd.service.http.server",
    "expertd.service.ranks.nodes.agent",
    "expertd.service.ranks.worker.device",
    "expertd.service.ranks.front.loading",
    "expertd.service.ranks.worker.worker",
    "expertd.service.ranks.partitions",
    "expertd.service.ranks.nodes.proxy",
    "expertd.service.ranks.recording",
    "expertd.service.ranks.nodes.remote",
    "fastapi_offline",
    "pydantic.v1",
    "uvloop",
)


_exit_code: int | None = 0  # None: this process ends as any Python does


def _end() -> None:
    """Skip the release of every object: it would copy the memory that forks share, in half a second."""
    if _exit_code is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_code)


def main() -> None:
    """Fork until the other end is closed; in a new process, run its program."""
    global _exit_code
    gc.disable()
    for name in _IMPORTS:
        import_module(name)
    import_module("expertd.kernels.backends.cpu").why_not(None)  # imports LLVM if there is one
    gc.freeze()
    gc.enable()
    sys.path.remove(str(Path.cwd()))  # programs do not see the tests
    if (program := _serve(socket.socket(fileno=int(sys.argv[1])))) is not None:
        _exit_code = None
        try:
            _run(program)
        except SystemExit as end:
            _exit_code = 0 if end.code is None else end.code if isinstance(end.code, int) else None
            raise
        _exit_code = 0


def _serve(connection: socket.socket) -> list[str] | None:
    """Fork on request; the program to run if this is a new process, None at the end."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, MAX_BYTES, MAX_DESCRIPTORS)
        if not message:
            return None
        request: Request = json.loads(message)
        if names := request.get("imports"):
            list(map(import_module, names))
            connection.send(b"0")
            continue
        if _fork_orphan():
            break
        for descriptor in descriptors:
            os.close(descriptor)
    above = max(*descriptors, *request["numbers"], connection.fileno()) + 1
    if request["has_children"]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if not os.fork():
            ours.close()
            connection.close()
            for descriptor in descriptors:
                os.close(descriptor)
            return _serve(theirs)
        theirs.close()
        fork_children(socket.socket(fileno=_moved(ours.detach(), above)))
    answer = socket.socket(fileno=_moved(connection.detach(), above))
    _number(descriptors, request["numbers"], above)
    _become(request)
    with answer:
        answer.send(str(os.getpid()).encode())
    return request["program"]


def _fork_orphan() -> bool:
    """Fork a process whose parent has ended; True in that process."""
    if between := os.fork():
        os.waitpid(between, 0)
        return False
    parent = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == parent:
        time.sleep(0.0005)
    return True


def _moved(descriptor: int, above: int) -> int:
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above)
    os.close(descriptor)
    return moved


def _number(descriptors: Sequence[int], numbers: Sequence[int], above: int) -> None:
    """Give descriptors their numbers, which are all below `above`."""
    moved = [_moved(descriptor, above) for descriptor in descriptors]
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _become(request: Request) -> None:
    """Look like a new Python, to this process and to others."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may run under `nohup`
    os.environ.clear()
    os.environ.update(request["environment"])
    if request["process_group"] is not None:
        os.setpgid(0, request["process_group"])
    # What /proc/PID/cmdline shows.
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    command = "\0".join((sys.executable, *request["program"])).encode()[: end - begin - 1]
    with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
        memory.seek(begin)
        memory.write(command.ljust(end - begin, b"\0"))


def _run(program: Sequence[str]) -> None:
    """Run `-P -m MODULE ARGUMENTS...` or `SCRIPT ARGUMENTS...` as Python would."""
    sys.orig_argv = [sys.executable, *program]
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    if path := os.environ.get("PYTHONPATH"):
        sys.path[:0] = path.split(os.pathsep)
        sys.modules.pop("sitecustomize", None)  # the system's own
        site.execsitecustomize()
    match program:
        case ["-P", "-m", module, *arguments]:
            sys.argv = [module, *arguments]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case [script, *arguments]:
            sys.argv = [script, *arguments]
            runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
