"""Where the gRPC server listens; needs none of its packages."""

import errno
import os
import socket

from expertd.service.http.listening import BindError, check_exposure
from expertd.service.settings.model import Settings


def check_address(settings: Settings) -> str:
    """The host and port for gRPC, which are free. Raises BindError."""
    host, port = settings.host, settings.grpc.port or 0
    check_exposure(settings)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        reason = os.strerror(error.errno or 0) if error.errno in errno.errorcode else error.strerror
        raise BindError(f"grpc.port: expected a free address, got {host}:{port}: {reason}") from error
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
