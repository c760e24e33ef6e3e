"""A program: an agent that waits, and gets thousands of signals."""

import os
import signal
import time

from expertd.service.ranks.nodes import agent
from tests.service.ranks.nodes import node_settings

if __name__ == "__main__":
    one = agent._Agent(node_settings().model_copy(update={"node_rank": 1}))
    signal.signal(signal.SIGUSR1, one._end)
    sender = os.fork()
    if sender == 0:
        for _ in range(3000):
            os.kill(os.getppid(), signal.SIGUSR1)
            time.sleep(2e-4)
        os._exit(0)
    while os.waitpid(sender, os.WNOHANG) == (0, 0):
        one._wait(0.0)
        one._signal = ""
