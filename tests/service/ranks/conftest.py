"""Ranks find each other without waiting for names that no test needs, and start by a fork."""

import os

from tests.service.forking import CAN_FORK, fork_children

# torch's store looks up the name of whoever connects, in the thread that answers everybody. Where the name
# server drops a query, that takes 5 seconds unless this, which all processes of a test inherit, says less.
os.environ.setdefault("RES_OPTIONS", "timeout:1")
if CAN_FORK:
    fork_children()
