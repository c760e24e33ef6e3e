"""The caller's end of a channel over NIXL, as a process of its own: NIXL is in no process of a caller."""

import mmap
import socket
import subprocess
import sys
import threading
from typing import Any

from expertd_client.channel.claiming import DESCRIPTORS, Claimed, close_in_child, mapped, receive
from expertd_client.deadline import Deadline
from expertd_client.errors import TransportUnavailableError
from expertd_client.nixl.installed import is_installed
from expertd_client.nixl.lines import receive_line, send_line

_SECONDS = 30.0  # for a process to start, or to meet the server's


class CallerProcess:
    """One for each channel: it lives as long as the channel's connection.

    Raises TransportUnavailableError if NIXL is missing or does not start, DeadlineError.
    """

    def __init__(self, data_bytes: int, deadline: Deadline) -> None:
        if not is_installed():
            text = "nixl: expected the package nixl-cu13 (pip install expertd-client[nixl]), got none"
            raise TransportUnavailableError(text)
        self._connection, other = socket.socketpair()
        close_in_child(self._connection)
        with other:
            program = [sys.executable, "-m", "expertd_client.nixl", "caller", str(other.fileno())]
            process = subprocess.Popen(
                program, stdin=subprocess.DEVNULL, pass_fds=[other.fileno()], start_new_session=True
            )
        threading.Thread(target=process.wait, name="expertd-nixl", daemon=True).start()
        try:
            self._described = self._ask({"data_bytes": data_bytes}, deadline)
        except BaseException:
            self.close()
            raise

    def memory(self) -> Any:
        """What the server is asked for."""
        return {"nixl": self._described}

    def claim(self, opened: Any, deadline: Deadline, memory: mmap.mmap | None = None) -> Claimed:
        """As `claiming.claim`, with what the server has answered."""
        try:
            geometry = opened["geometry"]
            sizes = {name: int(geometry[name]) for name in ("num_slots", "control_bytes", "data_bytes")}
            asked = {"geometry": geometry, "nixl": opened["nixl"]}
        except (KeyError, TypeError, ValueError) as error:
            text = f"answer: expected a channel over NIXL, got {opened!r:.200}"
            raise TransportUnavailableError(text) from error
        try:
            self._ask(asked, deadline)
            send_line(self._connection, {})
            descriptors = receive(self._connection, "nixl", (DESCRIPTORS,))
            return mapped(str(opened.get("id")), sizes, descriptors, self._connection, memory)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError | ValueError):
                raise TransportUnavailableError(
                    f"nixl: expected its process to go on, got {error}"
                ) from error
            raise

    def close(self) -> None:
        """End the process."""
        self._connection.close()

    def _ask(self, question: object, deadline: Deadline) -> Any:
        """What the process answers. Raises TransportUnavailableError, DeadlineError."""
        try:
            self._connection.settimeout(min(_SECONDS, deadline.check()))
            send_line(self._connection, question)
            answer = receive_line(self._connection)
        except (OSError, ValueError) as error:
            deadline.check()
            raise TransportUnavailableError(f"nixl: expected its process to answer, got {error}") from error
        if "error" in answer:
            raise TransportUnavailableError(f"nixl: {answer['error']}")
        return answer
