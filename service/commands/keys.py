"""`expertd keys`: makes API keys."""

import argparse
import secrets
import sys
from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_KEY_BYTES = 32


def add_parser(subparsers: "_SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the subcommand to `subparsers`."""
    parser = subparsers.add_parser("keys", help="make API keys")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    new = commands.add_parser(
        "new",
        help="print a new key, and the entry for the file of keys",
        description="Print a new random key on stderr, and on stdout the entry for the file that the setting "
        "`keys` names: `expertd keys new NAME --rights infer >> keys.yaml`. The key is stored nowhere.",
    )
    new.add_argument("name", help="of its holder, shown in metrics and logs")
    new.add_argument(
        "--rights",
        default="infer",
        help="infer, admin, metrics, or several: infer,metrics (default: %(default)s)",
    )
    new.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print a key and its entry; return 0, or 2 for a wrong name or right."""
    from expertd.service.settings.keys import wrong_entry

    key = secrets.token_urlsafe(_KEY_BYTES)
    rights = [right.strip() for right in arguments.rights.split(",")]
    digest = sha256(key.encode()).hexdigest()
    entry = {"name": arguments.name, "sha256": digest, "rights": rights}
    mistakes = list(wrong_entry(entry, shows_rights=True))
    for mistake in mistakes:
        print(f"expertd keys: {mistake.lstrip('.')}", file=sys.stderr)
    if mistakes:
        return 2
    print(f"key, shown only now: {key}", file=sys.stderr)
    print(f"- name: {arguments.name}\n  sha256: {digest}\n  rights: [{', '.join(rights)}]")
    return 0
