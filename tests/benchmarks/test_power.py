"""Watts, MHz and pJ/FLOP in `benchmarks grouped_gemm`, without a GPU."""

import ctypes
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gemm import grouped_gemm, power
from benchmarks.gemm.power import Figures
from benchmarks.gemm.shapes import Shape
from benchmarks.lib.markdown import NOT_MEASURED
from benchmarks.lib.nvml import Nvml, Sample, mean_watts
from benchmarks.report import SECTIONS
from expertd.layout import Layout


class Library:
    """NVML's functions as `Nvml` calls them; `refused` have a status other than 0."""

    def __init__(self, **refused: int) -> None:
        self.refused, self.asked = refused, b""

    def nvmlInit_v2(self) -> int:  # noqa: N802
        return self.refused.get("init", 0)

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, device: Any) -> int:  # noqa: N802
        self.asked = uuid
        device._obj.value = 7
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, device: ctypes.c_void_p, joules: Any) -> int:  # noqa: N802
        joules._obj.value = 5_000_000_000_123 if device.value == 7 else 0
        return self.refused.get("energy", 0)

    def nvmlDeviceGetPowerUsage(self, device: ctypes.c_void_p, milliwatts: Any) -> int:  # noqa: N802
        milliwatts._obj.value = 689_500
        return self.refused.get("power", 0)

    def nvmlDeviceGetClockInfo(self, device: ctypes.c_void_p, clock: int, mhz: Any) -> int:  # noqa: N802
        mhz._obj.value = {1: 1316}[clock]  # 0 would be the clock of graphics
        return 0


def sensor(**refused: int) -> Nvml:
    library: Any = Library(**refused)
    return Nvml(library, "GPU-1")


def test_a_reading_is_in_joules_watts_and_mhz() -> None:
    library: Any = Library()
    first, second = Nvml(library, "GPU-12-ab").read(), sensor().read()
    assert library.asked == b"GPU-12-ab"
    assert (first.joules, first.watts, first.mhz) == (5_000_000_000.123, 689.5, 1316)
    assert first.seconds <= second.seconds


def test_a_missing_energy_counter_is_none() -> None:
    assert sensor(energy=3).read().joules is None


@pytest.mark.parametrize(
    ("refused", "name"),
    [({"init": 9}, "nvmlInit"), ({"energy": 15}, "nvmlDeviceGetTotalEnergyConsumption"),
     ({"power": 3}, "nvmlDeviceGetPowerUsage")],
)  # fmt: skip
def test_refusals_name_the_function(refused: dict[str, int], name: str) -> None:
    with pytest.raises(RuntimeError, match=f"{name}: expected status 0, got {next(iter(refused.values()))}"):
        sensor(**refused).read()


def test_power_is_counted_between_changes_of_the_counter() -> None:
    """The counter moves at 0.1, 0.2 and 0.4 s; what is before and after has no known energy."""
    joules = {0.0: 50, 0.05: 50, 0.1: 90, 0.15: 90, 0.2: 150, 0.4: 300, 0.45: 300}
    samples = [Sample(seconds, value, 1.0, 1.0) for seconds, value in joules.items()]
    assert mean_watts(samples) == pytest.approx((300 - 90) / 0.3)


def test_without_a_counter_the_sensors_mean_counts() -> None:
    assert mean_watts([Sample(0, None, watts, 1) for watts in (600, 700)]) == 650


def test_a_counter_that_stands_still_is_refused() -> None:
    with pytest.raises(ValueError, match="energy counter: expected 2 changes, got 1 in 3 samples"):
        mean_watts([Sample(0, 1, 1, 1), Sample(1, 1, 1, 1), Sample(2, 2, 1, 1)])


def test_an_operations_energy() -> None:
    """690 W for 1631 us and 1.928e12 operations: DeepGEMM's large shape."""
    flops = 2 * 4 * 8212 * 4096 * 7168
    entry = power.entry(Figures(1631, 690, 1316), flops)
    assert entry["pj_per_flop"] == pytest.approx(690 * 1631e-6 / flops * 1e12)
    assert 0.58 < entry["pj_per_flop"] < 0.59


def test_the_fills_energy_is_left_out() -> None:
    entry = power.entry(Figures(500, 600, 1500), 10**9, around=Figures(200, 450, 1900))
    assert (entry["us"], entry["watts"], entry["mhz"]) == (300, 600, 1500)
    assert entry["pj_per_flop"] == pytest.approx((500 * 600 - 200 * 450) * 1e-6 / 1e9 * 1e12)


def test_the_largest_shapes_come_first() -> None:
    heights = (16, 4096, 1, 512)
    shapes = [Shape("", Layout.CONTIGUOUS, (rows,), 128, 128) for rows in heights]
    assert grouped_gemm.largest(shapes, 2) == [1, 3]
    assert grouped_gemm.largest(shapes, 0) == []


def test_energy_in_the_documents(tmp_path: Path) -> None:
    ours = {"us": 904.0, "watts": 692.0, "mhz": 1334.0, "pj_per_flop": 0.651}
    theirs = {"us": 866.0, "watts": 690.0, "mhz": 1385.0, "pj_per_flop": 0.62}
    both = {"ours": ours, "deep_gemm": theirs}
    row: dict[str, Any] = {"shape": "s", "power": {"loop": both, "cold": both}}
    file = tmp_path / "grouped_gemm-h200.json"
    file.write_text(json.dumps({"rows": [{"shape": "other"}, row]}))
    text = SECTIONS["grouped-gemm-power"](tmp_path)
    assert "| s | 0.651 | 0.620 | 1.050 | 0.651 | 0.620 | 1.050 |\n" in text
    assert text.endswith("\n\nBoth ran at 690 to 692 W and 1334 to 1385 MHz.")
    row["power"] = {"loop": both, "cold": {"ours": ours}}
    file.write_text(json.dumps({"rows": [row]}))
    assert SECTIONS["grouped-gemm-power"](tmp_path) == NOT_MEASURED
