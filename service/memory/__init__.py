"""Memory that the device reads and writes by address: spans of it, and the blocks that HTTP takes."""

from expertd.service.memory.arena import Arena, Block
from expertd.service.memory.span import Buffer, Register, Span, Unregister, host_view, nothing_to_register

__all__ = ["Arena", "Block", "Buffer", "Register", "Span", "Unregister", "host_view", "nothing_to_register"]
