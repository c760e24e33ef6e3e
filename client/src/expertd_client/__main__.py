"""The command `expertd-client`, also `python -m expertd_client`."""

import sys


def main() -> int:
    """Run the command line."""
    return 0


if __name__ == "__main__":
    sys.exit(main())
