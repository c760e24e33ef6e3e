"""Partitions of lanes right after loading: as in the settings, or as the server chooses them later, too."""

from typing import Any

import pytest

from expertd.kernels import resolve_backend
from expertd.kernels.partitions import Supply
from expertd.service.engine import loading
from expertd.service.engine.layers import layer_of
from tests.service.apps import tiny_settings
from tests.service.http.routes.test_partitions import GRANULARITY, TOTAL, Device

LANES = {"decode_max_tokens": 4, "decode_partition": "decode", "prefill_partition": "prefill"}


class SplitDevice(Device):
    supply = Supply(TOTAL, GRANULARITY, TOTAL // GRANULARITY, 0)  # 4 SMs fit no partition


@pytest.mark.parametrize(("chooses", "prefill"), [({}, 64), ({"decode_p99_ms": 1.0}, 80)])
def test_prefill_has_all_other_sms_where_the_server_chooses(
    monkeypatch: pytest.MonkeyPatch, chooses: dict[str, Any], prefill: int
) -> None:
    """Before the layers are made, whose graphs are of the partitions."""
    device, seen = SplitDevice(), []

    def resolved(name: str) -> Any:
        backend = resolve_backend(name)
        monkeypatch.setattr(backend, "partitions", lambda: device, raising=False)
        return backend

    def make_layer(*given: Any) -> Any:
        seen.append({each.name: each.num_sms for each in device.partitions})
        return layer_of(*given)

    monkeypatch.setattr("expertd.service.engine.loading.resolve_backend", resolved)
    given = tiny_settings(lanes=LANES | chooses, partitions={"decode": 41, "prefill": 64})
    loaded = loading.load(given, lambda: False, make_layer=make_layer)
    assert loaded.partitions is device
    assert seen == [{"decode": 48, "prefill": prefill}]
