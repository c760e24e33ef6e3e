"""`expertd bench` and `expertd pool`: commands of the client."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_COMMANDS = {"bench": "measure a running server", "pool": "show the servers of a pool"}


def add_parser(subparsers: "_SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the subcommands to `subparsers`; all their arguments are the client's."""
    for name, text in _COMMANDS.items():
        # No argument begins with NUL, so that all of them, also options, are kept for the client.
        parser = subparsers.add_parser(name, help=text, add_help=False, prefix_chars="\0")
        parser.add_argument("arguments", nargs="*")
        parser.set_defaults(run=run, command=name)


def run(arguments: argparse.Namespace) -> int:
    """Run the client's command; return its exit code."""
    from expertd_client.__main__ import main  # not for every command

    return main([arguments.command, *arguments.arguments], prog="expertd")
