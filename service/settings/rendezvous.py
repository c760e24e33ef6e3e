"""Where nodes meet: HOST:PORT, also as torchrun's variables say it."""

import re
from collections.abc import Mapping
from functools import partial
from typing import Annotated

from pydantic import AfterValidator

from expertd.service.settings.values import Assignment, Key, check_host

TORCHRUN = ("NNODES", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")

_FORM = re.compile(r"([^\s:/]{1,253}):([0-9]{1,5})")
_MAX_PORT = 65535


def host_and_port(rendezvous: str) -> tuple[str, int]:
    """Both parts. Raises ValueError for any other form."""
    found = _FORM.fullmatch(rendezvous)
    if found is None or not 0 < int(found[2]) <= _MAX_PORT:
        raise ValueError(f"expected HOST:PORT, with a port of 1 to {_MAX_PORT}, got {rendezvous!a:.80}")
    return check_host(found[1]), int(found[2])


def _checked(rendezvous: str) -> str:
    host_and_port(rendezvous)
    return rendezvous


Rendezvous = Annotated[str, AfterValidator(_checked)]


def torchrun_assignments(variables: Mapping[str, str]) -> list[Assignment]:
    """The settings in variables of TORCHRUN; NODE_RANK overrides GROUP_RANK, as the one that people set."""
    found = []
    for name, key in (("NNODES", "nnodes"), ("GROUP_RANK", "node_rank"), ("NODE_RANK", "node_rank")):
        if name in variables:
            found.append(_assignment(key, variables[name], f"environment variable {name}"))
    if "MASTER_ADDR" in variables and "MASTER_PORT" in variables:
        text = f"{variables['MASTER_ADDR']}:{variables['MASTER_PORT']}"
        origin = "environment variables MASTER_ADDR, MASTER_PORT"
        found.append(_assignment("rendezvous", text, origin))
    return found


def _assignment(key: str, text: str, origin: str) -> Assignment:
    return Assignment((key,), text, partial(_always, origin))


def _always(origin: str, _: Key) -> str:
    return origin
