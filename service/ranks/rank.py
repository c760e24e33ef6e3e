"""One rank, or the proxy of one, for the process that starts it: its process, its socket and its rings."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from expertd.service.engine.rank_metrics import RankDevice
from expertd.service.ranks.messages import receive, send
from expertd.service.ranks.ring import Bell
from expertd.service.ranks.setup import SETUP, RankSetup, RingSizes, Role

_MODULE = "expertd.service.ranks.process"
_SEND_SECONDS = 1.0  # a rank that reads nothing for so long is as good as dead


class Rank:
    """A rank that has been started. `end_bell` is rung at the end of its steps. Raises OSError."""

    def __init__(self, setup: RankSetup, end_bell: Bell) -> None:
        self.number = setup.rank
        self._name = "its proxy's process" if setup.role is Role.PROXY else "its process"
        self.loaded = False
        self.device = RankDevice()
        self.partitions: list[Any] = []  # what it said of them when it had loaded
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection.settimeout(_SEND_SECONDS)
        bell, sizes = Bell(), RingSizes.of(setup.settings)
        memory = os.memfd_create("expertd-ring", os.MFD_CLOEXEC)
        try:
            with theirs, tempfile.TemporaryFile() as setup_file:
                os.ftruncate(memory, sizes.total_bytes)
                self.rings = sizes.rings(memory, bell, end_bell)
                setup.write(setup_file)
                # A process group of its own: Ctrl-C is for this process, which tells the others.
                command = [sys.executable, "-P", "-m", _MODULE, str(theirs.fileno())]
                self.process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), process_group=0
                )
                descriptors = (setup_file.fileno(), memory, bell.descriptor, end_bell.descriptor)
                self.send(SETUP, descriptors=descriptors)
        except BaseException:
            self.connection.close()
            raise
        finally:
            os.close(memory)

    def send(self, *message: Any, descriptors: Sequence[int] = ()) -> None:
        """Send a message. One that is not taken, because the rank ends, is lost with it."""
        with suppress(OSError):
            send(self.connection, *message, descriptors=descriptors)

    def receive(self) -> list[Any]:
        """The next message; empty if the process has ended."""
        message, _ = receive(self.connection)
        return message

    def why_gone(self, seconds: float = 0.0) -> str | None:
        """How the process has ended, at most in `seconds`, or been stopped; None: it runs."""
        with suppress(subprocess.TimeoutExpired):
            code = self.process.wait(seconds)
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            return f"rank {self.number}: {self._name} ended {how}"
        stopped = os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        return None if stopped is None else f"rank {self.number}: {self._name} was stopped"

    def note_device(self, memory: Sequence[int] | None, *of_kernels: Any) -> None:
        """Keep what a DEVICE message says."""
        self.device = RankDevice(None if memory is None else (memory[0], memory[1]), *of_kernels)

    def put(self, command: bytes) -> None:
        """Send a step."""
        self.rings.commands.put(command)
        self.rings.command_bell.ring()

    def end(self, seconds: float = 0.0) -> None:
        """Wait up to `seconds` for the process to end, then kill it."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self.process.kill()
        self.process.wait()
        self.connection.close()
