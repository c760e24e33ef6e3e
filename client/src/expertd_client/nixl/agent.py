"""NIXL between two processes: each writes into the memory of the other, and sends it messages."""

import base64
import ctypes
import mmap
import secrets
from typing import Any

Ranges = tuple[tuple[int, int], ...]
"""Offsets and numbers of bytes."""

_MAX_KEPT = 256  # transfers that are ready to be made again
_MAX_METADATA = 64 << 10


class PeerError(Exception):
    """The other process has gone, or does not keep to the protocol; the text says which."""


class Agent:
    """One memory, and one peer whose memory has the same size. For one thread.

    Raises ImportError where NIXL is not installed, RuntimeError where it does not start.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory  # kept mapped
        self.num_bytes = len(memory)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        try:
            self._agent = _started()
            self._agent.register_memory([(self._address, self.num_bytes, 0, "")], "DRAM")
        except ImportError:
            raise
        except Exception as error:  # NIXL's errors have no class of their own in common
            raise RuntimeError(f"nixl: expected an agent to start, got {error}") from error
        self._peer = ""
        self._there = 0
        self._ready: dict[Ranges, Any] = {}  # transfers that were made
        self._pending: list[tuple[Ranges, Any]] = []

    def described(self) -> dict[str, Any]:
        """What the peer needs for `connect`."""
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return {"byte_size": self.num_bytes, "address": self._address, "metadata": metadata}

    def connect(self, described: Any) -> None:
        """Be able to write and send to the peer. Raises PeerError."""
        try:
            address, size = int(described["address"]), int(described["byte_size"])
            metadata = base64.b64decode(described["metadata"], validate=True)
            if not 0 <= address < 1 << 63 or len(metadata) > _MAX_METADATA:
                raise ValueError("out of range")
        except (KeyError, TypeError, ValueError) as error:
            raise PeerError(f"nixl: expected an agent, got {described!r:.200}") from error
        if size != self.num_bytes:
            raise PeerError(f"byte_size: expected {self.num_bytes}, got {size}")
        try:
            self._peer = self._agent.add_remote_agent(metadata).decode()
            self._agent.make_connection(self._peer)
        except Exception as error:
            raise PeerError(f"metadata: expected an agent's that can be reached, got {error}") from error
        self._there = address

    def send(self, message: bytes) -> None:
        """Have the peer `receive` a message. Raises PeerError."""
        try:
            self._agent.send_notif(self._peer, message)
        except Exception as error:
            raise _lost(error) from error

    def write(self, ranges: Ranges, message: bytes) -> None:
        """Write parts of the memory to the same places of the peer's, then send a message. Raises PeerError.

        The parts must not change before the peer has answered; `advance` goes on with it.
        """
        try:
            transfer = self._ready.pop(ranges, None)
            if transfer is None:
                here, there = (
                    self._agent.get_xfer_descs([(start + offset, size, 0) for offset, size in ranges], "DRAM")
                    for start in (self._address, self._there)
                )
                transfer = self._agent.initialize_xfer("WRITE", here, there, self._peer, message)
            self._begun(ranges, transfer, self._agent.transfer(transfer, message))
        except PeerError:
            raise
        except Exception as error:
            raise _lost(error) from error

    def advance(self) -> None:
        """Go on with writes that are not complete. Raises PeerError."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        for ranges, transfer in pending:
            try:
                state = self._agent.check_xfer_state(transfer)
            except Exception as error:
                raise _lost(error) from error
            self._begun(ranges, transfer, state)

    @property
    def is_writing(self) -> bool:
        """Whether writes are not complete."""
        return bool(self._pending)

    def receive(self) -> "list[bytes]":
        """The messages that have come from the peer. Raises PeerError."""
        try:
            found = self._agent.get_new_notifs()
        except Exception as error:
            raise _lost(error) from error
        if not found:
            return []
        messages: list[bytes] = found.get(self._peer, [])
        return messages

    def _begun(self, ranges: Ranges, transfer: Any, state: str) -> None:
        if state == "PROC":
            self._pending.append((ranges, transfer))
        elif state != "DONE":
            raise PeerError(f"nixl: expected a write to be made, got {state}")
        elif len(self._ready) < _MAX_KEPT:
            self._ready[ranges] = transfer
        else:
            self._agent.release_xfer_handle(self._ready.pop(next(iter(self._ready))))
            self._ready[ranges] = transfer


def _started() -> Any:
    """An agent whose name nobody else knows: messages in other names are not read."""
    from nixl_cu13._api import nixl_agent, nixl_agent_config

    # Without a thread of NIXL's, which would spin.
    config = nixl_agent_config(enable_prog_thread=False, backends=[])
    agent = nixl_agent(secrets.token_hex(16), config)
    try:
        agent.create_backend("UCX")
    except Exception:  # if UCX_TLS allows only transports that do not find out that a peer has gone
        agent.create_backend("UCX", {"ucx_error_handling_mode": "none"})
    return agent


def _lost(error: Exception) -> PeerError:
    return PeerError(f"nixl: expected a peer, got {error}")
