"""The agent of a node without the front end: it starts the node's ranks when the front end says so.

It waits for the front end, which may be gone and come back; shows that it is there; and ends its ranks when
one of them is lost, so that the others' exchanges fail and the front end starts all again.
"""

import logging
import signal
import socket
import threading
import time
from contextlib import closing
from types import FrameType
from typing import Any

from expertd.service.ranks.front.group import RankGroup
from expertd.service.ranks.front.rank import Inbox
from expertd.service.ranks.front.starting import RankLoadError, start_ranks, wait_loaded
from expertd.service.ranks.nodes.board import BEAT_SECONDS, Board, shared_settings
from expertd.service.ranks.rendezvous import Rendezvous, between_nodes
from expertd.service.ranks.ring import Bell
from expertd.service.ranks.setup import RankSetup, Role
from expertd.service.settings.model import Settings
from expertd.service.util.sentences import shown

logger = logging.getLogger(__name__)

_SILENT_SECONDS = 5.0  # of the store, after which the front end's machine is out of reach
_CONNECT_SECONDS = 1.0


def run_agent(settings: Settings) -> int:
    """Run the node's ranks until SIGTERM, SIGINT or SIGHUP; the exit code.

    After a signal the ranks go on while the front end drains, at most as long as that may take; a second one
    ends them at once. 1 if the front end was away for too long, 2 if the settings do not fit its own.
    """
    return _Agent(settings).run()


class _RefusedError(Exception):
    """The front end does not take this agent."""


class _Agent:
    def __init__(self, settings: Settings) -> None:
        self._settings, self._node = settings, settings.node_rank
        self._signal = ""  # the name of the last one
        self._bell = Bell()  # rung at a signal; not an Event, whose lock the interrupted code may hold
        self._end_by = 0.0  # after a signal
        self._inbox = Inbox()
        self._group: RankGroup | None = None

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._end)
        seconds = self._settings.rendezvous_timeout_seconds
        while True:
            logger.info("waiting %g s for the front end at %s", seconds, self._settings.rendezvous)
            rendezvous = self._find(seconds)
            if rendezvous is None:
                break
            try:
                with closing(_Session(self._settings, rendezvous)) as session:
                    self._serve(session)
            except _RefusedError as error:
                logger.error("%s", error)
                return 2
            except RuntimeError as error:
                logger.debug("the store failed", exc_info=error)
            if self._signal:
                return 0
            logger.error("the front end is gone")
        if self._signal:
            return 0
        logger.error("rendezvous: expected a front end within %g s, got none", seconds)
        return 1

    def _find(self, seconds: float) -> Rendezvous | None:
        """Where the front end is, once it is there; None after `seconds`, or a signal."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._signal:
            try:
                rendezvous = between_nodes(self._settings)  # each time: a name may get another address
                socket.create_connection((rendezvous.host, rendezvous.port), _CONNECT_SECONDS).close()
                return rendezvous
            except (OSError, ValueError) as error:
                logger.debug("no front end: %s", error)
            self._wait(BEAT_SECONDS)
        return None

    def _serve(self, session: "_Session") -> None:
        """Run groups until the front end is gone, or a signal and the last group's end."""
        done = 0
        while session.is_alive() and not (self._signal and self._is_over()):
            if session.generation == done:
                if self._wait(BEAT_SECONDS / 5):
                    return
                continue
            done = session.generation
            self._run_group(session, done)
            if self._signal:
                return
        if session.refused is not None:
            raise _RefusedError(session.refused)

    def _run_group(self, session: "_Session", generation: int) -> None:
        setups = [
            RankSetup(self._settings, rank, session.rendezvous, generation, Role.REMOTE)
            for rank in range(self._settings.num_ranks)
            if rank // self._settings.ranks_per_node == self._node
        ]

        def stop() -> bool:
            over = bool(self._signal) and self._is_over()
            return over or session.generation != generation or not session.is_alive()

        try:
            ranks = start_ranks(setups, self._inbox)
        except OSError as error:
            why = f"the ranks cannot be started: {error}"
            logger.error("%s", why)
            session.report(generation, f"{why} (node {self._node})")
            return
        group = RankGroup(generation, ranks, self._inbox, self._settings.step_timeout_seconds)
        self._group = group
        why = "the agent failed"
        try:
            wait_loaded(ranks, self._inbox, stop, lambda: None)
            if not stop():
                logger.info("the ranks of node %d are ready", self._node)
            while not stop() and group.lost is None:
                group.look()
            why = group.lost or self._why_ended(session)
        except RankLoadError as error:
            why = str(error).removeprefix("loading: ")
        finally:
            self._group = None
            session.report(generation, f"{why} (node {self._node})")
            group.end()
        logger.info("the ranks of node %d have ended: %s", self._node, why)

    def _why_ended(self, session: "_Session") -> str:
        """Why ranks end that are not lost."""
        if self._signal and self._is_over():
            return f"the agent was stopped by {self._signal}"
        if session.refused is not None:
            return f"the agent was refused: {session.refused}"
        return "the front end starts all ranks again" if session.is_alive() else "the front end is gone"

    def _end(self, number: int, frame: FrameType | None) -> None:
        """A signal."""
        settings = self._settings
        again, self._signal = bool(self._signal), signal.Signals(number).name
        drain = settings.shutdown_delay_seconds + settings.drain_timeout_seconds
        self._end_by = time.monotonic() + (0.0 if again else drain)
        self._bell.ring()
        self._inbox.wake()

    def _wait(self, seconds: float) -> bool:
        """Wait for a signal; whether there was one."""
        return self._bell.wait(lambda: bool(self._signal), 0.0, seconds)

    def _is_over(self) -> bool:
        return self._group is None or time.monotonic() > self._end_by


class _Session:
    """The time from a front end's arrival to its end. A thread beats. Raises RuntimeError."""

    def __init__(self, settings: Settings, rendezvous: Rendezvous) -> None:
        self.rendezvous = rendezvous
        self.generation = 0  # of the present group
        self.refused: str | None = None
        self._settings, self._node = settings, settings.node_rank
        self._board, self._reports = Board(rendezvous), Board(rendezvous)
        self._place = self._board.arrive(self._node)
        self._beaten = time.monotonic()
        self._gone = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="expertd-beat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread: the interpreter aborts if it ends while a thread is in a call of the store."""
        self._closed.set()
        self._thread.join(_SILENT_SECONDS)

    def is_alive(self) -> bool:
        """Whether the front end is there, and has not refused this agent."""
        if self._gone or self.refused is not None:
            return False
        return time.monotonic() - self._beaten < _SILENT_SECONDS

    def report(self, generation: int, why: str) -> None:
        """Tell the front end why the node's ranks have ended, if it is there."""
        try:
            if not self._gone:
                self._reports.report(generation, self._node, why)
        except RuntimeError:
            self._gone = True

    def _beat(self) -> None:
        count, agreed = 0, False
        try:
            while not self._closed.is_set() and not self._gone and self.refused is None:
                if not agreed and (shared := self._board.shared()) is not None:
                    self.refused, agreed = self._difference(shared), True
                elif self._board.agents(self._node) != self._place:
                    self.refused = f"node {self._node}: expected one agent, got another one"
                elif agreed:
                    count += 1
                    self._board.beat(self._node, self._place, count)
                    self.generation = self._board.generation()
                self._beaten = time.monotonic()
                self._closed.wait(BEAT_SECONDS)
        except RuntimeError:
            self._gone = True

    def _difference(self, shared: dict[str, object]) -> str | None:
        """Say which setting differs from the front end's, also to it."""
        own: dict[str, object] = shared_settings(self._settings)
        for name in sorted(own.keys() | shared.keys()):
            if own.get(name) != shared.get(name):
                path, expected, got = _difference(name, shared.get(name), own.get(name))
                text = f"{path}: expected on node {self._node} what node 0 has, {expected}, got {got}"
                self._board.refuse(self._node, self._place, text)
                return text
        return None


def _difference(path: str, expected: Any, got: Any) -> tuple[str, str, str]:
    """The path of the first value that differs, and both values, short enough for a sentence."""
    if isinstance(expected, dict) and isinstance(got, dict):
        for name in sorted(expected.keys() | got.keys()):
            if expected.get(name) != got.get(name):
                return _difference(f"{path}.{name}", expected.get(name), got.get(name))
    if isinstance(expected, list) and isinstance(got, list) and len(expected) == len(got):
        for number, pair in enumerate(zip(expected, got, strict=True)):
            if pair[0] != pair[1]:
                return _difference(f"{path}.{number}", *pair)
    return path, shown(expected), shown(got)
