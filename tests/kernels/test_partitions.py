"""Rounding and fitting the sizes of SM partitions, without a GPU; the contexts are tested on a GPU."""

import pytest
import torch

from expertd.backends import BACKENDS
from expertd.kernels import partitions
from expertd.kernels.backends.reference.backend import ReferenceBackend
from expertd.kernels.partitions import Partition, Supply, plan

H200 = Supply(total_sms=132, unit_sms=8, units=16, spare_sms=4)
EVEN = Supply(total_sms=128, unit_sms=8, units=16, spare_sms=0)
MUCH_TO_SPARE = Supply(total_sms=132, unit_sms=8, units=14, spare_sms=20)


class OnGPU(ReferenceBackend):
    """Whatever a backend computes with, its partitions are the GPU's."""

    capabilities = BACKENDS["triton"]


@pytest.mark.parametrize("name", ["hopper", "triton"])
def test_backends_of_gpus_have_those_of_the_current_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(partitions, "SMPartitions", lambda device: f"of {device}")
    monkeypatch.setattr(OnGPU, "capabilities", BACKENDS[name])
    assert str(OnGPU().partitions()) == "of 3"
    assert ReferenceBackend().partitions() is None


def test_a_gpu_without_green_contexts_has_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    error = pytest.importorskip("cuda.core._utils.cuda_utils").CUDAError

    def refuse(device: int) -> None:
        raise error("CUDA_ERROR_NOT_SUPPORTED")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(partitions, "SMPartitions", refuse)
    assert OnGPU().partitions() is None
    assert caplog.messages == [
        "partitions: expected green contexts on cuda:1, got none: CUDA_ERROR_NOT_SUPPORTED"
    ]


def granted(sizes: dict[str, int], supply: Supply = H200) -> dict[str, int]:
    return {share.partition.name: share.partition.num_sms for share in plan(sizes, supply)}


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, {}),
        ({"a": 1}, {"a": 8}),
        ({"a": 8}, {"a": 8}),
        ({"a": 9}, {"a": 12}),  # a group and the spare SMs are less than two groups
        ({"a": 13}, {"a": 16}),
        ({"a": 132}, {"a": 132}),
        ({"compute": 112, "communication": 20}, {"compute": 112, "communication": 20}),
        ({"communication": 20, "compute": 112}, {"communication": 20, "compute": 112}),
        ({"a": 64, "b": 64}, {"a": 64, "b": 64}),
        ({"a": 60, "b": 60}, {"a": 60, "b": 64}),  # only one can have the spare SMs
        ({f"p{i}": 1 for i in range(16)}, {f"p{i}": 8 for i in range(16)}),
    ],
)
def test_sizes_are_rounded_up_to_groups(sizes: dict[str, int], expected: dict[str, int]) -> None:
    assert granted(sizes) == expected


def test_the_requested_size_is_kept_beside_the_granted_one() -> None:
    (share,) = plan({"a": 100}, EVEN)
    assert (share.partition, share.units, share.spare) == (Partition("a", 100, 104), 13, False)


def test_groups_and_spare_sms_are_granted_once() -> None:
    for first in range(1, 133):
        for second in range(1, 133 - first):
            try:
                shares = plan({"a": first, "b": second}, H200)
            except ValueError:
                assert first + second > 120, f"{first} and {second} fit"
                continue
            assert sum(share.units for share in shares) <= H200.units
            assert sum(share.spare for share in shares) <= 1
            for share in shares:
                spare = H200.spare_sms if share.spare else 0
                assert share.partition.requested_sms <= share.partition.num_sms
                assert share.partition.num_sms == share.units * H200.unit_sms + spare


def test_more_to_spare_than_a_group() -> None:
    assert granted({"a": 112, "b": 20}, MUCH_TO_SPARE) == {"a": 112, "b": 20}
    assert granted({"a": 112, "b": 17}, MUCH_TO_SPARE) == {"a": 112, "b": 20}
    assert granted({"a": 8}, MUCH_TO_SPARE) == {"a": 8}


@pytest.mark.parametrize(
    ("sizes", "supply", "expected"),
    [
        ({"a": 133}, H200, "got a 133: 133 SMs, 17 groups"),
        (
            {"a": 129},
            EVEN,
            "expected to fit 128 SMs, given out in 16 groups of 8 (a partition has 1 at least)",
        ),
        (
            {"a": 112, "b": 24},
            H200,
            "in 16 groups of 8 (a partition has 1 at least), and 4 more for one partition",
        ),
        ({"a": 112, "b": 24}, H200, "got a 112, b 24: 136 SMs, 17 groups"),
        ({f"p{i}": 1 for i in range(17)}, H200, "17 SMs, 17 groups"),
    ],
)
def test_sizes_that_do_not_fit_are_rejected_with_the_numbers(
    sizes: dict[str, int], supply: Supply, expected: str
) -> None:
    with pytest.raises(ValueError, match="partitions: expected to fit") as caught:
        plan(sizes, supply)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("name", "size", "expected"),
    [
        ("a", 0, "partitions.a: expected a number of SMs of at least 1, got 0"),
        ("a", -8, "partitions.a: expected a number of SMs of at least 1, got -8"),
        ("a", True, "partitions.a: expected a number of SMs of at least 1, got True"),
        ("a", 8.0, "partitions.a: expected a number of SMs of at least 1, got 8.0"),
        ("", 8, "partitions: expected a name for 8 SMs, got ''"),
    ],
)
def test_wrong_sizes(name: str, size: int, expected: str) -> None:
    with pytest.raises(ValueError, match="partitions") as caught:
        plan({name: size}, H200)
    assert str(caught.value) == expected
