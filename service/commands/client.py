"""`expertd bench` and `expertd pool`: commands of the client, if that is installed."""

import argparse
import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_COMMANDS = {"bench": "measure a running server", "pool": "show the servers of a pool"}


def add_parser(subparsers: "_SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the subcommands to `subparsers`; all their arguments are the client's."""
    for name, text in _COMMANDS.items():
        # No argument begins with NUL, so that all of them, also options, are kept for the client.
        parser = subparsers.add_parser(
            name, help=f"{text} (needs expertd-client)", add_help=False, prefix_chars="\0"
        )
        parser.add_argument("arguments", nargs="*")
        parser.set_defaults(run=run, command=name)


def run(arguments: argparse.Namespace) -> int:
    """Run the client's command; return its exit code, or 2 if the client is not installed."""
    name = arguments.command
    try:
        importlib.import_module("expertd_client")
    except ModuleNotFoundError as error:
        if error.name != "expertd_client":
            raise
        expected = "an installed package (pip install ./client)"
        print(f"expertd {name}: expertd_client: expected {expected}, got none", file=sys.stderr)
        return 2
    client = importlib.import_module("expertd_client.__main__")
    code: int = client.main([name, *arguments.arguments], prog="expertd")
    return code
