"""`expertd kernels`: the closed list of kernel variants, and which of them the cache holds compiled."""

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(subparsers: "_SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the sub-command to `subparsers`."""
    parser = subparsers.add_parser("kernels", help="list the compiled kernels' variants")
    parser.set_defaults(run=_list)


def _list(arguments: argparse.Namespace) -> int:
    # Here, not above: torch takes seconds to import, and `expertd --version` should not.
    from kernels import tiles
    from kernels.jit.compiler import find

    print(f"{'variant':44} {'cached':>6} {'registers':>9} {'spilled':>7}")
    for variant in tiles.VARIANTS:
        source = tiles.source(*variant)
        try:
            binary = find(source)
        except ImportError as error:
            print(
                f"expertd: the extra expertd[cuda] is expected to be installed, got: {error}", file=sys.stderr
            )
            return 2
        if binary is None:
            print(f"{source.name:44} {'no':>6}")
            continue
        usage = binary.usage
        spilled = usage.spill_store_bytes + usage.spill_load_bytes
        print(f"{source.name:44} {'yes':>6} {usage.registers:9} {spilled:7}")
    return 0
