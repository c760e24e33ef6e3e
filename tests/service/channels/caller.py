"""A caller in a process of its own, for tests that kill it: reads an opened channel and a plan from stdin.

It runs as many requests as planned and checks every answer; without a number, it sends requests and never
looks at an answer. Prints a line after each answer.
"""

import json
import sys

import numpy as np

from tests.service.channels.peer import Peer


def main() -> None:
    plan = json.load(sys.stdin)
    peer = Peer(plan["opened"])
    random = np.random.default_rng(plan["seed"])
    if plan["requests"] is None:
        for sequence in range(1, peer.num_slots + 1):
            peer.send(peer.max_tokens, peer.places(sequence))
        print("sent", flush=True)
        peer.wait(1 + peer.num_slots, 60)
    # Different ones, so that an answer to another request, or an old one, is noticed.
    tokens = random.integers(1, peer.max_tokens, 10, endpoint=True)
    inputs = [random.standard_normal((count, peer.hidden_size), dtype=np.float32) for count in tokens]
    expected = [peer.infer(hidden_states) for hidden_states in inputs]
    for _ in range(plan["requests"]):
        one = int(random.integers(len(inputs)))
        # Other callers' tokens in its step may change how it is rounded in bf16.
        atol = 2**-7 * np.abs(expected[one]).max()
        np.testing.assert_allclose(peer.infer(inputs[one]), expected[one], rtol=0, atol=atol)
        print("answered", flush=True)
    peer.close()


if __name__ == "__main__":
    main()
