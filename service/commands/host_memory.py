"""The host's memory that a server takes at most for layers and large tensors, by arithmetic; not what each
connection may hold beside that: headers, a small body, or JSON.
"""

import resource
from collections.abc import Mapping
from dataclasses import dataclass

from expertd.backends import Capabilities
from expertd.service.device.host_memory import free_host_bytes
from expertd.service.engine.memory_needs import host_experts_bytes, staging_of_model
from expertd.service.http.listening import has_channels
from expertd.service.http.worker_setup import channel_sizes, shares
from expertd.service.ranks.front.staging import staging_bytes
from expertd.service.ranks.setup import MAX_SENT
from expertd.service.ranks.shares import shares_here, size
from expertd.service.settings.lanes import lanes_of
from expertd.service.settings.model import Settings

_BUFFERED = "limits.max_buffered_bytes"
_OF_GRPC = " of gRPC"
_EXPERTS = "experts that weights_budget leaves there"
_NO_SETTINGS = {"layers", "steps", _EXPERTS}


@dataclass(frozen=True)
class HostMemory:
    """Bytes by the setting that limits them, or by what they are for.

    pinned   on a GPU, taken when the server starts
    at_most  taken when callers use them
    free     of the host, or of its container
    """

    pinned: Mapping[str, int]
    at_most: Mapping[str, int]
    free: int

    @property
    def total(self) -> int:
        """All that the server can take."""
        return sum(self._parts.values())

    @property
    def text(self) -> str:
        """For people."""
        return f"up to {size(self.total)} ({_listed(self._parts)})"

    @property
    def warning(self) -> str | None:
        """What to do if callers can make the server take more than is free; None if they cannot."""
        if self.total <= self.free:
            return None
        parts = self._parts
        largest = max(parts.keys() - _NO_SETTINGS, key=lambda name: parts[name])
        hints = []
        if (layers := parts.get("layers", 0)) >= parts[largest]:
            hints.append("serve fewer layers")
        if layers < parts[largest] or self.total - parts[largest] <= self.free:
            hints.append(f"lower {largest.removesuffix(_OF_GRPC)}")
        return (
            f"host memory: expected room for {self.text}, got {size(self.free)} free: the system may kill "
            f"the server when callers use it all; {', or '.join(hints)}"
        )

    @property
    def _parts(self) -> dict[str, int]:
        return {**self.pinned, **self.at_most}


def host_memory(settings: Settings, capabilities: Capabilities) -> HostMemory:
    """What the front end takes, and on a CPU the layers of this node. Not the memory of callers' regions
    on a CPU, which only copies them.
    """
    buffered = {_BUFFERED: _buffered_bytes(settings)}
    steps = {"steps": _staged_bytes(settings, capabilities)}
    shared = {"shared_memory.max_bytes": settings.shared_memory.max_bytes * settings.shared_memory.enabled}
    experts = {_EXPERTS: host_experts_bytes(settings, capabilities)}
    if capabilities.on_gpu:
        pinned, at_most = {**experts, **buffered, **steps}, shared
    else:
        layers = sum(share.num_bytes for _, share, _ in shares_here(settings, capabilities))
        pinned, at_most = {}, {"layers": layers, **experts, **steps, **buffered}
    at_most["channels.max_bytes"] = settings.channels.max_bytes * has_channels(settings)
    # Messages of single calls, and of streams.
    has_grpc = settings.grpc.port is not None
    at_most[f"{_BUFFERED}{_OF_GRPC}"] = 2 * has_grpc * shares(settings).buffered_bytes
    return HostMemory(_without_zeros(pinned), _without_zeros(at_most), free_host_bytes())


def check_host_memory(settings: Settings, capabilities: Capabilities) -> HostMemory:
    """As `host_memory`. Raises MemoryError, with the numbers, if what is pinned at the start does not fit, or
    a file of memory is larger than files may be.
    """
    memory = host_memory(settings, capabilities)
    one, limit = shares(settings), resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    largest = channel_sizes(one)[1] if settings.http_workers > 1 else one.buffered_bytes
    if limit != resource.RLIM_INFINITY and limit < largest:
        expected = f"files of up to {size(largest)} ({_BUFFERED})"
        raise MemoryError(f"host memory: expected {expected}, got a limit of {size(limit)} (ulimit -f)")
    if (pinned := sum(memory.pinned.values())) > memory.free:
        listed = f"{size(pinned)} that a GPU needs pinned from the start ({_listed(memory.pinned)})"
        got = f"{size(memory.free)} free{_what_would_do(settings, capabilities, memory.free)}"
        raise MemoryError(f"host memory: expected room for {listed}, got {got}")
    return memory


def _buffered_bytes(settings: Settings) -> int:
    """Of bodies and outputs; HTTP processes have parts of their own, beside that of the device's process."""
    one = shares(settings)
    count = settings.http_workers
    return one.buffered_bytes + (count * channel_sizes(one)[1] if count > 1 else 0)


def _staged_bytes(settings: Settings, capabilities: Capabilities) -> int:
    """Between requests and the device, or the ranks."""
    models, tokens = settings.models, settings.limits.max_batch_tokens
    if settings.num_ranks > 1:
        each = (staging_bytes(tokens, model.hidden_size, model.top_k) for model in models)
        return MAX_SENT * max(each, default=0)
    if not capabilities.on_gpu:
        return 0
    return sum(
        max((staging_of_model(lane.limits, model) for model in models), default=0)
        for lane in lanes_of(settings)
    )


def _what_would_do(settings: Settings, capabilities: Capabilities, free: int) -> str:
    """A hint: memory for bodies with which the rest fits; empty if none would do."""
    limits = settings.limits.model_copy(update={"max_buffered_bytes": settings.min_buffered_bytes})
    fewer = settings.model_copy(update={"limits": limits})
    experts = host_experts_bytes(settings, capabilities)
    if _buffered_bytes(fewer) + _staged_bytes(fewer, capabilities) + experts <= free:
        return f"; {_BUFFERED} of {limits.max_buffered_bytes} would do"
    if experts > free:
        return ""
    return "; lower limits.max_body_bytes or limits.max_batch_tokens"


def _listed(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in parts.items())


def _without_zeros(parts: Mapping[str, int]) -> dict[str, int]:
    return {name: num_bytes for name, num_bytes in parts.items() if num_bytes}
