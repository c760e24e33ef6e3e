"""An HTTP server that only receives and sends, for `benchmarks serving`; its argument is a port.

It answers each request with as many bytes as its body has, from memory that is there, with plain blocking
sockets and a thread for each connection: no server that receives a body before it answers is faster.
"""

import re
import socket
import sys
import threading

_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)", re.I)


def answer_all(connection: socket.socket) -> None:
    """Answer the requests of one connection."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    body = bytearray()
    while True:
        received = b""
        while b"\r\n\r\n" not in received:
            piece = connection.recv(65536)
            if not piece:
                return
            received += piece
        head, _, rest = received.partition(b"\r\n\r\n")
        found = _LENGTH.search(head)
        size = int(found[1]) if found else 0
        if len(body) < size:
            body = bytearray(size)
        view = memoryview(body)[:size]
        view[: len(rest)] = rest
        done = len(rest)
        while done < size:
            done += connection.recv_into(view[done:])
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        connection.sendall(view)


def main() -> None:
    """Serve until the end of the process."""
    with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as listener:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=answer_all, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    main()
