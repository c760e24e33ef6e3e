"""Claiming a channel by hand: the connection that it lives as long as."""

import socket
import subprocess
import sys
from pathlib import Path

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
        entries = ":".join(entry for entry in sys.path if entry)
        program = [sys.executable, "-c", FORK, str(path)]
        with subprocess.Popen(
            program,
            env={"PYTHONPATH": entries},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        ) as parent:
            try:
                connection, _ = server.accept()
                assert len(connection.recv(16)) == 16
                assert parent.stdin is not None
                assert parent.stdout is not None
                parent.stdin.write(b"fork\n")
                parent.stdin.flush()
                assert parent.stdout.readline() == b"late\n"
                with connection:
                    connection.settimeout(10)
                    assert connection.recv(1) == b"", "the server sees that the claim has ended"
            finally:
                subprocess.run(["kill", "-9", "--", f"-{parent.pid}"], check=False)
