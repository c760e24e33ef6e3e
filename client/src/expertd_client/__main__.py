"""The command `expertd-client`, also `python -m expertd_client`; `expertd bench` runs it too."""

import argparse
import sys
from collections.abc import Sequence

from expertd_client.bench.arguments import add_arguments, run
from expertd_client.version import __version__


def main(argv: Sequence[str] | None = None, prog: str = "expertd-client") -> int:
    """Run the command line; returns the exit code, 2 for what cannot be measured."""
    parser = argparse.ArgumentParser(prog=prog, allow_abbrev=False, description="A client for expertd.")
    parser.add_argument("--version", action="version", version=f"expertd-client {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    bench = commands.add_parser(
        "bench",
        allow_abbrev=False,
        help="measure a running server",
        description="Measure a running server: latency percentiles and throughput, for every combination of "
        "--tokens and --connections, each answer checked.",
    )
    add_arguments(bench)
    bench.set_defaults(run=run, command=bench.prog)
    arguments = parser.parse_args(argv)
    code: int = arguments.run(arguments)
    return code


if __name__ == "__main__":
    sys.exit(main())
