"""The process at one end of a channel over NIXL: `python -m expertd_client.nixl caller|server DESCRIPTOR`.

It is started with one end of a pair of sockets, and lives as long as both.
"""

import logging
import os
import socket
import sys
from contextlib import suppress

from expertd_client.errors import TransportUnavailableError
from expertd_client.nixl import caller_end, server_end
from expertd_client.nixl.agent import PeerError
from expertd_client.nixl.lines import send_line

# Of the peer, of NIXL, and of what started this, which may say anything or be gone.
_EXPECTED = (
    PeerError,
    ImportError,
    RuntimeError,
    OSError,
    TransportUnavailableError,
    ValueError,
    KeyError,
    TypeError,
)
_ENDS = {"caller": caller_end.serve, "server": server_end.serve}


def main(arguments: "list[str]") -> int:
    """Returns the exit code: 0 if the connection or the peer ended, 1 if the channel did not begin."""
    which, number = arguments
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # what started this says when a peer has gone
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    logging.disable(logging.INFO)  # NIXL's go to the standard output
    with socket.socket(fileno=int(number)) as connection:
        try:
            _ENDS[which](connection)
        except _EXPECTED as error:
            with suppress(OSError):
                send_line(connection, {"error": f"{error}"})
            return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    os._exit(code)  # at once: the system frees what NIXL has
