"""`expertd bench`: the client's load generator, if the client is installed."""

import argparse
import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(subparsers: "_SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the subcommand to `subparsers`; all its arguments are the client's."""
    # No argument begins with NUL, so that all of them, also options, are kept for the client.
    parser = subparsers.add_parser(
        "bench", help="measure a running server (needs expertd-client)", add_help=False, prefix_chars="\0"
    )
    parser.add_argument("arguments", nargs="*")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the client's command; return its exit code, or 2 if the client is not installed."""
    try:
        importlib.import_module("expertd_client")
    except ModuleNotFoundError as error:
        if error.name != "expertd_client":
            raise
        print(
            "expertd bench: expertd_client: expected an installed package (pip install ./client), got none",
            file=sys.stderr,
        )
        return 2
    client = importlib.import_module("expertd_client.__main__")
    code: int = client.main(["bench", *arguments.arguments], prog="expertd")
    return code
