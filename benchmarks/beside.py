"""One-token requests beside long ones: `python -m benchmarks.beside [--chunk N ...] [--join] [--lanes N]`.

The demo layer, served on this machine, answers a caller that sends one token again and again, while other
connections repeat requests of 4,096 tokens, or 16 of 64. With and without chunks of the long ones. Every
process may use all cores, so server and callers compete for them, too.
"""

import argparse
import sys
from collections.abc import Sequence

import numpy as np

from benchmarks.json_beside import binary, measure, server

CASES = ((0, 0), (1, 4096), (4, 4096), (16, 64))  # connections, and the tokens of their requests


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row of the table for each case and size of chunks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--chunk", type=int, nargs="+", default=[0, 512, 1024], help="0: no chunks")
    parser.add_argument("--join", action="store_true", help="set limits.join_chunks")
    parser.add_argument("--lanes", type=int, default=0, help="set lanes.decode_max_tokens")
    parser.add_argument("--seconds", type=float, default=10.0)
    given = parser.parse_args(arguments)
    print(
        "| chunks | beside | requests | p50, ms | p99, ms | tokens beside, 1/s |\n|---|---|---|---|---|---|"
    )
    for chunk in given.chunk:
        limits = {"prefill_chunk_tokens": chunk, "join_chunks": str(given.join).lower()}
        settings = [f"limits.{name}={value}" for name, value in limits.items()]
        with server(*settings, f"lanes.decode_max_tokens={given.lanes}") as port:
            for connections, num_tokens in CASES:
                beside = binary(num_tokens) if connections else None
                took, answered = measure(port, beside, connections, given.seconds)
                p50, p99 = np.percentile(np.array(took) * 1e3, (50, 99))
                name = f"{connections} x {num_tokens}" if connections else "nothing"
                rate = answered * num_tokens / given.seconds
                print(
                    f"| {chunk or 'none'} | {name} | {len(took)} | {p50:.1f} | {p99:.1f} | {rate:.0f} |",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
