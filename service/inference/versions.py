"""Which versions of expertd-client this server works with. Callers of other kinds say none."""

from collections.abc import Iterable

from expertd import __version__
from expertd.service.inference.errors import RequestError
from expertd.service.util.sentences import shown

CLIENT = b"expertd-client"
"""The header, or gRPC metadata, with the client's version."""
CLIENT_VERSIONS = "0.1"
"""The beginning that they have in common."""


def check_client(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raise RequestError, with both versions, if a client says one with which this server does not work."""
    for name, value in headers:
        if name == CLIENT and not value.startswith(CLIENT_VERSIONS.encode() + b"."):
            expected = f"version {CLIENT_VERSIONS}.x with expertd {__version__}"
            raise RequestError(f"expertd-client: expected {expected}, got {shown(value.decode('latin-1'))}")
