"""Runs a soak: `python -m tests.soak [--seconds S] [--requests N] [--json FILE]`; 1 if anything was wrong."""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from expertd.backends import BACKENDS
from tests.soak.soaking import CALLERS, Soak, mistakes


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the result."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description=(__doc__ or "").partition(":")[0]
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="before the server is ended")
    parser.add_argument("--requests", type=int, default=0, help="at least, before the server is ended")
    parser.add_argument("--idle", type=int, default=1000, help="idle connections")
    parser.add_argument("--slots", type=int, default=8, help="requests in flight of the channel's caller")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds, of callers between requests")
    parser.add_argument("--kind", choices=CALLERS, action="append", help="of callers; default: all")
    parser.add_argument("--backend", choices=tuple(BACKENDS), default="cpu")
    parser.add_argument("--devices", help="GPUs of the second server's ranks, as in 0-1; default: one rank")
    parser.add_argument("--growth", type=float, default=0.02, help="of memory and descriptors, at most")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        result = Soak(
            Path(folder),
            given.seconds,
            given.requests,
            given.idle,
            given.slots,
            given.pause,
            given.kind or CALLERS,
            given.backend,
            given.devices,
        ).run()
    text = json.dumps(result, indent=1)
    print(text)
    if given.json:
        given.json.write_text(text + "\n")
    found = mistakes(result, given.growth)
    for each in found:
        print(f"soak: {each}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
