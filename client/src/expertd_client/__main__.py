"""The command `expertd-client`, also `python -m expertd_client`; `expertd` has its subcommands, too."""

import argparse
import sys
from collections.abc import Sequence

from expertd_client import overview
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
    pool = commands.add_parser(
        "pool",
        allow_abbrev=False,
        help="show the servers of a pool",
        description="Show, until Ctrl-C, which servers there are, whether they are ready, what they have and "
        "do, and who calls over channels. The variable EXPERTD_KEY has the API key.",
    )
    overview.add_arguments(pool)
    pool.set_defaults(run=overview.run, command=pool.prog)
    arguments = parser.parse_args(argv)
    code: int = arguments.run(arguments)
    return code


if __name__ == "__main__":
    sys.exit(main())
