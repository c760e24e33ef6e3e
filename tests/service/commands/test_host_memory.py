"""The host's memory that a server takes at most with its settings, against what is free."""

import logging
import re
import resource
from typing import Any

import pytest

from expertd.backends import BACKENDS, Capabilities
from expertd.service.commands import host_memory as module
from expertd.service.commands.host_memory import check_host_memory, host_memory
from expertd.service.commands.serve import check_memory
from expertd.service.ranks.shares import shares_of
from tests.service.apps import MODEL, tiny_settings

HOPPER, REFERENCE = BACKENDS["hopper"], BACKENDS["reference"]

GIB = 1 << 30
MEMORY = 8 * GIB  # of a small laptop
CHANNELS = {"socket": "channels", "max_bytes": 6 * GIB}


@pytest.fixture
def of_8_gb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "free_host_bytes", lambda: MEMORY)


def at_most(capabilities: Capabilities, **changes: Any) -> dict[str, int]:
    memory = host_memory(tiny_settings(**changes), capabilities)
    assert memory.total == sum(memory.pinned.values()) + sum(memory.at_most.values())
    return {**memory.pinned, **memory.at_most}


def test_every_setting_for_large_tensors_counts() -> None:
    buffered = {"limits.max_buffered_bytes": GIB}
    (share,) = shares_of(tiny_settings(), REFERENCE)
    assert at_most(REFERENCE, channels={"socket": None}) == {"layers": share.num_bytes, **buffered}
    for given in (CHANNELS, {"max_bytes": 6 * GIB}):
        assert at_most(REFERENCE, channels=given)["channels.max_bytes"] == 6 * GIB
    assert "channels.max_bytes" not in at_most(REFERENCE, host="0.0.0.0"), "they are off"
    grpc = {"limits.max_buffered_bytes of gRPC": 2 * GIB}  # single messages, and streams
    assert at_most(REFERENCE, grpc={"port": 0}).items() >= grpc.items()
    # Each of 4 processes has a quarter for its bodies, and as much for cells at most; so has the device's.
    workers = at_most(REFERENCE, http_workers=4)["limits.max_buffered_bytes"]
    assert 5 * GIB // 4 < workers <= 5 * GIB // 4 + GIB
    ranks = at_most(REFERENCE, ranks=2)
    assert ranks["layers"] > share.num_bytes, "each has the router"
    assert ranks["steps"] > 0, "between the front end and the ranks"


def test_regions_of_callers_count_where_they_are_pinned() -> None:
    regions = {"enabled": True, "max_bytes": 5 * GIB}
    assert "shared_memory.max_bytes" not in at_most(REFERENCE, shared_memory=regions)
    assert at_most(HOPPER, shared_memory=regions)["shared_memory.max_bytes"] == 5 * GIB
    assert "shared_memory.max_bytes" not in at_most(HOPPER, shared_memory={"max_bytes": 5 * GIB})


@pytest.mark.usefixtures("of_8_gb")
@pytest.mark.parametrize("capabilities", [REFERENCE, HOPPER])
def test_a_server_with_default_settings_fits_a_small_machine(capabilities: Capabilities) -> None:
    assert check_host_memory(tiny_settings(), capabilities).warning is None


@pytest.mark.usefixtures("of_8_gb")
def test_more_than_is_free_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_memory(tiny_settings(channels=CHANNELS))
        assert not caplog.messages
        settings = tiny_settings(channels=CHANNELS, grpc={"port": 0})
        check_memory(settings)
        (warning,) = caplog.messages
    parts = r"layers \d.*, limits.max_buffered_bytes 1.1 GB, channels.max_bytes 6.4 GB, .* of gRPC 2.1 GB"
    expected = rf"host memory: expected room for up to 9\.7 GB \({parts}\), got 8\.6 GB free: .*"
    assert re.fullmatch(expected, warning), warning
    assert warning.endswith("; lower channels.max_bytes")
    caplog.clear()
    other = {"nnodes": 2, "node_rank": 1, "rendezvous": "127.0.0.1:1"}
    check_memory(settings.model_copy(update=other))
    assert not caplog.messages, "node 0 has the front end"


@pytest.mark.parametrize(
    ("free", "hint"),
    [(0.5, "; serve fewer layers"), (1.05, "; serve fewer layers, or lower limits.max_buffered_bytes")],
)
def test_layers_that_take_nearly_all_are_named(
    free: float, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {**MODEL, "hidden_size": 8192, "intermediate_size": 8192, "num_experts": 8}
    settings = tiny_settings(models=[model], channels={"socket": None})
    layers = host_memory(settings, REFERENCE).at_most["layers"]
    assert layers > GIB
    monkeypatch.setattr(module, "free_host_bytes", lambda: int(free * layers))
    assert str(check_host_memory(settings, REFERENCE).warning).endswith(f"when callers use it all{hint}")


@pytest.mark.usefixtures("of_8_gb")
def test_what_a_gpu_needs_pinned_must_fit() -> None:
    """A CPU's memory for bodies is there when callers use it: there it is only a warning."""
    limits = {"max_buffered_bytes": 9 * GIB}
    assert check_host_memory(tiny_settings(limits), REFERENCE).warning is not None
    with pytest.raises(MemoryError) as caught:
        check_host_memory(tiny_settings(limits), HOPPER)
    parts = r"limits\.max_buffered_bytes 9\.7 GB, steps \d+\.\d MB"
    expected = (
        rf"host memory: expected room for 9\.7 GB that a GPU needs pinned from the start \({parts}\), "
        r"got 8\.6 GB free; limits\.max_buffered_bytes of (\d+) would do"
    )
    found = re.fullmatch(expected, str(caught.value))
    assert found is not None, caught.value
    least = int(found[1])
    assert check_host_memory(tiny_settings({"max_buffered_bytes": least}), HOPPER).warning is None


@pytest.mark.usefixtures("of_8_gb")
@pytest.mark.parametrize(("workers", "largest"), [(1, "1.1 GB"), (2, "604.0 MB")])
def test_files_of_memory_may_be_as_large(workers: int, largest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tiny_settings(http_workers=workers)
    for most, enough in ((resource.RLIM_INFINITY, True), (GIB, True), (1 << 20, False), (0, False)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, most=most: (most, most))
        if enough:
            check_host_memory(settings, REFERENCE)
            continue
        with pytest.raises(MemoryError) as caught:
            check_host_memory(settings, REFERENCE)
        expected = f"host memory: expected files of up to {largest} (limits.max_buffered_bytes)"
        assert str(caught.value) == f"{expected}, got a limit of {most / 1e6:.1f} MB (ulimit -f)"


@pytest.mark.usefixtures("of_8_gb")
def test_bodies_that_no_memory_is_enough_for() -> None:
    limits = {"max_body_bytes": 3 * GIB}  # each may take four times as much
    with pytest.raises(MemoryError, match=r"; lower limits\.max_body_bytes or limits\.max_batch_tokens$"):
        check_host_memory(tiny_settings(limits), HOPPER)
