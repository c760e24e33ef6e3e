"""What a call can wait for. Generators yield these, and are resumed with the result."""

import select
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from expertd_client.address import Address
from expertd_client.http.connection import Connection

READ = select.POLLIN
WRITE = select.POLLOUT

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wait:
    """Until the connection can be read or (`events` has both bits) written; gives the bits that hold."""

    connection: Connection
    events: int


@dataclass(frozen=True, slots=True)
class Connect:
    """Until there is a new connection, which it gives; raises ServerUnreachableError."""

    address: Address


@dataclass(frozen=True, slots=True)
class Sleep:
    """For a time; gives nothing."""

    seconds: float


Waiting: TypeAlias = Generator["Wait | Connect | Sleep", Any, T]
"""A call in progress that returns T. Any wait may raise DeadlineError instead of giving its result."""
