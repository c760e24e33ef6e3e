"""Watts, MHz and pJ/FLOP in `benchmarks grouped_gemm`, without a GPU."""

import pytest

from benchmarks.gemm import power
from benchmarks.gemm.power import Figures
from benchmarks.lib.nvml import Sample, mean_watts


def test_power_is_counted_between_changes_of_the_counter() -> None:
    """The counter moves at 0.1, 0.2 and 0.4 s; what is before and after has no known energy."""
    joules = {0.0: 50, 0.05: 50, 0.1: 90, 0.15: 90, 0.2: 150, 0.4: 300, 0.45: 300}
    samples = [Sample(seconds, value, 1.0, 1.0) for seconds, value in joules.items()]
    assert mean_watts(samples) == pytest.approx((300 - 90) / 0.3)


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
