"""Where nodes meet: HOST:PORT."""

import re
from typing import Annotated

from pydantic import AfterValidator

from expertd.service.settings.values import check_host

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


RendezvousAddress = Annotated[str, AfterValidator(_checked)]
