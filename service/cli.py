"""The `expertd` command."""

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from typing import Any

from expertd import __version__
from expertd.service.commands import check, client, kernels, keys, layers, profile, serve
from expertd.service.util.sentences import did_you_mean, like, shown

_UNWRITABLE = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO)
_COMMANDS = (serve, check, layers, keys, kernels, profile, client)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, 2 for invalid arguments or settings.

    1 if the output cannot be written: whoever reads it, such as `head`, has ended, or the disk is full.
    """
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        if sys.stdout is not None:  # it may be closed
            sys.stdout.flush()
    except OSError as error:
        if sys.stdout is None or error.filename is not None or error.errno not in _UNWRITABLE:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the exit
        if not isinstance(error, BrokenPipeError):
            print(f"expertd: expected to write the output, got an error: {error.strerror}", file=sys.stderr)
        return 1
    return code


class _Parser(argparse.ArgumentParser):
    """Also those of the commands take flags in full only: a new flag could make an abbreviation another's."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, rest = super().parse_known_args(args, namespace)
        for flag in (word.partition("=")[0] for word in rest if word.startswith("-")):
            self.error(
                f"unrecognized argument: {shown(flag)}{did_you_mean(like(flag, self._option_string_actions))}"
            )
        return found, rest


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="expertd", description="A server for MoE expert layers.")
    parser.add_argument("--version", action="version", version=f"expertd {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(subparsers)
    return parser
