"""One rank, or the proxy of one, for the process that starts it: its process, its socket and its rings.

`Rank` keeps what the rank has said over its socket. One thread at a time takes that by `hear`.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from expertd.service.engine.metrics.ranks import RankDevice
from expertd.service.ranks.messages import receive, send
from expertd.service.ranks.regions import Exported, SharedRegion
from expertd.service.ranks.ring import Bell
from expertd.service.ranks.setup import MAP, OPEN, SETUP, UNMAP, RankSetup, RingSizes, Role

_MODULE = "expertd.service.ranks.process"
_SEND_SECONDS = 1.0  # a rank that reads nothing for so long is as good as dead
_CLOSED_SECONDS = 2.0  # from the end of the socket to that of the process


class Rank:
    """A rank that has been started. `end_bell` is rung at the end of its steps. Raises OSError.

    about    the backend and device, once it has loaded
    failure  why it could not load, and whether that is a sentence about the settings or files
    mapped   by region: an error, or ""; None: it has not answered yet
    closing  the regions that it has to forget, and has not yet
    answer   its last answer about partitions
    recorded  its last answer about a recording: the kind of an error and its text, or ""
    moved    its last `MoveCommand`: number, seconds, and an error or ""
    """

    def __init__(self, setup: RankSetup, end_bell: Bell) -> None:
        self.number = setup.rank
        self._name = "its proxy's process" if setup.role is Role.PROXY else "its process"
        self.device = RankDevice()
        self.about: tuple[str, str] | None = None
        self.failure: tuple[str, bool] | None = None
        self.mapped: dict[int, str | None] = {}
        self.closing: set[int] = set()
        self._is_deaf = False
        self.answer: list[Any] | None = None
        self.recorded: str | None = None
        self.moved: tuple[int, float, str] = (0, 0.0, "")
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection.settimeout(_SEND_SECONDS)
        bell, sizes = Bell(), RingSizes.of(setup.settings)
        memory = os.memfd_create("expertd-ring", os.MFD_CLOEXEC)
        try:
            with theirs, os.fdopen(os.memfd_create("expertd-setup"), "w+b") as setup_file:
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
        """Send a message. One that is not taken is lost, and the rank with it."""
        try:
            send(self.connection, *message, descriptors=descriptors)
        except TimeoutError:
            self._is_deaf = True
        except OSError:  # it ends
            pass

    def hear(self) -> str | None:
        """Take the next message, for which this waits; a sentence if it means that the rank is lost."""
        message, _ = receive(self.connection)
        match message:
            case ["mapped", int(region), str(error)]:
                if region in self.mapped:
                    self.mapped[region] = error
            case ["unmapped", int(region)]:
                self.closing.discard(region)
            case ["device", memory, *of_kernels]:
                self.note_device(memory, *of_kernels)
            case ["partitions", str(), list()]:
                self.answer = message[1:]
            case ["recorded", str(error)]:
                self.recorded = error
            case ["moved", int(number), float(seconds), str(error)]:
                self.moved = number, seconds, error
            case ["loaded", str(backend), str(device)]:
                self.about = backend, device
            case ["failed", str(text), bool(is_expected)]:
                self.failure = f"rank {self.number}: {text}", is_expected
                return self.failure[0]
            case ["lost", str(why)]:
                return why
            case _:
                return self.why_gone(_CLOSED_SECONDS) or f"rank {self.number}: its socket was closed"
        return None

    def note_device(self, memory: Sequence[int] | None, *of_kernels: Any) -> None:
        """Keep what a DEVICE message says."""
        self.device = RankDevice(None if memory is None else (memory[0], memory[1]), *of_kernels)

    def map(self, region: SharedRegion) -> None:
        """Have a region mapped, unless it is; `mapped` has the answer."""
        memory, number = region.memory, region.number
        if number in self.mapped:
            return
        self.mapped[number] = None
        if isinstance(memory, Exported):
            self.send(OPEN, number, memory.handle.hex(), memory.num_bytes)
        else:
            what = MAP, number, memory.num_bytes, memory.offset, region.of_caller
            self.send(*what, descriptors=[memory.descriptor])

    def unmap(self, number: int) -> None:
        """Have a region forgotten that no step uses any more."""
        if number in self.mapped:
            del self.mapped[number]
            self.closing.add(number)
            self.send(UNMAP, number)

    @property
    def num_unanswered(self) -> int:
        """Regions that it has to map or to forget, and has not yet."""
        return len(self.closing) + sum(error is None for error in self.mapped.values())

    def why_gone(self, seconds: float = 0.0) -> str | None:
        """How the process has ended, at most in `seconds`, or been stopped; None: it runs."""
        with suppress(subprocess.TimeoutExpired):
            code = self.process.wait(seconds)
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            return f"rank {self.number}: {self._name} ended {how}"
        if self._is_deaf:
            return f"rank {self.number}: {self._name} takes no messages"
        stopped = os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        return None if stopped is None else f"rank {self.number}: {self._name} was stopped"

    def put(self, command: bytes) -> None:
        """Send a step."""
        self.rings.commands.put(command)
        self.rings.command_bell.ring()

    def end(self) -> None:
        """Kill the process, unless it has ended."""
        self.process.kill()
        self.process.wait()
        self.connection.close()


class Inbox:
    """What all ranks of a process have in common, also those that start later.

    bell     rung at the end of a rank's step
    putting  all ranks get commands in one order
    changed  notified when a rank has said something
    """

    def __init__(self) -> None:
        self.bell = Bell()
        self.putting = threading.Lock()
        self.changed = threading.Condition()
        self._woken = Bell()

    def take(self, ranks: Sequence[Rank], seconds: float) -> str | None:
        """Receive what ranks send within `seconds`; why one is lost, or None.

        For one thread at a time. Ends early after `wake`.
        """
        found = [rank.hear() for rank in self._readable(ranks, seconds)]
        if found:
            with self.changed:
                self.changed.notify_all()
        return next((why for why in found if why is not None), None)

    def has_news(self, ranks: Sequence[Rank]) -> bool:
        """Whether `take` would return at once."""
        return bool(self._readable(ranks, 0))

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait on another thread than that of `take` until what ranks send makes it hold; whether it does."""
        with self.changed:
            return self.changed.wait_for(condition, seconds)

    def wake(self) -> None:
        """End `take`, and have conditions checked."""
        with self.changed:
            self.changed.notify_all()
        self._woken.ring()

    def _readable(self, ranks: Sequence[Rank], seconds: float) -> list[Rank]:
        """The ranks that have sent something or ended, once there are any."""
        poll = select.poll()
        by_descriptor = {rank.connection.fileno(): rank for rank in ranks}
        for descriptor in (*by_descriptor, self._woken.descriptor):
            poll.register(descriptor, select.POLLIN)
        found = [descriptor for descriptor, _ in poll.poll(1000 * seconds)]
        if self._woken.descriptor in found:
            self._woken.clear()
        return [by_descriptor[descriptor] for descriptor in found if descriptor in by_descriptor]
