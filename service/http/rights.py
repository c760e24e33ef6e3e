"""The right that each call needs, in one table. A test compares it with the application's routes."""

from collections.abc import Collection
from typing import NamedTuple

from starlette.routing import compile_path

from expertd.service.settings.keys import RIGHTS, Right

_INFER: tuple[Right, ...] = ("infer",)
_ADMIN: tuple[Right, ...] = ("admin",)
_METRICS: tuple[Right, ...] = ("metrics",)
_READ: tuple[Right, ...] = ("infer", "admin")
_WATCH: tuple[Right, ...] = ("admin", "metrics")
ANY: tuple[Right, ...] = RIGHTS

# "METHOD path" as the application's routes have it -> the rights, any of which is enough; none: open to all
CALLS: dict[str, tuple[Right, ...]] = {
    "GET /v2/health/live": (),
    "GET /v2/health/ready": (),
    "GET /v2/models/{model}/ready": (),
    "GET /v2/models/{model}/versions/{version}/ready": (),
    "GET /v2/models/stats": ANY,  # before the pattern of a model's metadata
    "GET /v2/models/{model}/stats": ANY,
    "GET /v2/models/{model}/versions/{version}/stats": ANY,
    "GET /v2/models/{model}/config": _READ,
    "GET /v2/models/{model}/versions/{version}/config": _READ,
    "GET /v2": _READ,
    "GET /v2/models/{model}": _READ,
    "GET /v2/models/{model}/versions/{version}": _READ,
    "POST /v2/repository/index": _READ,
    "POST /v2/repository/models/{model}/load": _ADMIN,
    "POST /v2/repository/models/{model}/unload": _ADMIN,
    "POST /v2/models/{model}/infer": _INFER,
    "POST /v2/models/{model}/versions/{version}/infer": _INFER,
    "GET /v2/systemsharedmemory/status": _INFER,
    "GET /v2/systemsharedmemory/region/{name}/status": _INFER,
    "POST /v2/systemsharedmemory/region/{name}/register": _INFER,
    "POST /v2/systemsharedmemory/region/{name}/unregister": _INFER,
    "POST /v2/systemsharedmemory/unregister": _INFER,
    "GET /v2/cudasharedmemory/status": _INFER,
    "GET /v2/cudasharedmemory/region/{name}/status": _INFER,
    "POST /v2/cudasharedmemory/region/{name}/register": _INFER,
    "POST /v2/cudasharedmemory/region/{name}/unregister": _INFER,
    "POST /v2/cudasharedmemory/unregister": _INFER,
    "POST /v1/channels": _INFER,
    "GET /v1/channels": _INFER,
    "GET /v1/channels/{channel}": _INFER,
    "DELETE /v1/channels/{channel}": _READ,
    "GET /v1/partitions": _READ,
    "PUT /v1/partitions": _ADMIN,
    "GET /v1/placement": _READ,
    "POST /v1/placement": _ADMIN,
    "GET /metrics": _METRICS,
    "GET /v1/log": _READ,
    "PUT /v1/log": _ADMIN,
    "POST /v1/profile": _ADMIN,
    "POST /v1/models/{model}/routing": _INFER,
    "GET /v1/live": _WATCH,
    "GET /": (),  # the page without any data, for a browser has no way to send a key for it
    "GET /page/{name}": (),
    "GET /openapi.json": ANY,
    "GET /docs": ANY,
    "GET /docs/{name}": ANY,
}


class _Call(NamedTuple):
    method: str
    rights: tuple[Right, ...]


# The application's own patterns, so that no path can match there and not here.
_PATTERNS = [
    (compile_path(call.partition(" ")[2])[0], _Call(call.partition(" ")[0], rights))
    for call, rights in CALLS.items()
]


def rights_for(method: str, path: str) -> Collection[Right]:
    """The rights for a call, any of which is enough; empty: it needs no key.

    `path` is decoded. A call that does not exist needs a key, too, whatever its rights.
    """
    method = "GET" if method in ("HEAD", "OPTIONS") else method
    found = [call.rights for pattern, call in _PATTERNS if call.method == method and pattern.match(path)]
    return found[0] if found else ANY
