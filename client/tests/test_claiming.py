"""Claiming a channel by hand: the connection that it lives as long as."""

import socket
from pathlib import Path

from tests.programs import running

FORK = """
import os, sys, threading, time
from expertd_client.channel.claiming import claim
from expertd_client.channel.layout import VERSION
from expertd_client.deadline import Deadline
from expertd_client.errors import DeadlineError

geometry = {"num_slots": 1, "control_bytes": 4096, "data_bytes": 4096}
opened = {"version": VERSION, "socket": sys.argv[1], "token": "00" * 16, "geometry": geometry}

def claiming():
    try:
        claim(opened, Deadline(2))
    except DeadlineError:
        print("late", flush=True)

thread = threading.Thread(target=claiming)
thread.start()
sys.stdin.readline()
if not os.fork():
    time.sleep(60)
    os._exit(0)
thread.join()
"""


def test_a_fork_during_a_claim_does_not_keep_the_connection_open(tmp_path: Path) -> None:
    path = tmp_path / "channels"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        server.settimeout(30)
        with running(FORK, str(path)) as parent:
            connection, _ = server.accept()
            with connection:
                assert len(connection.recv(16)) == 16
                parent.tell("fork")
                assert parent.says("late")
                connection.settimeout(10)
                assert connection.recv(1) == b"", "the server sees that the claim has ended"
