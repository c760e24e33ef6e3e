"""SM partitions on a GPU: kernels report the SMs they ran on."""

import gc
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from expertd.kernels import grouped_gemm_contiguous
from expertd.kernels.backends.hopper.compute_permutation import VARIANT, compute_permutation
from expertd.kernels.backends.hopper.launch import Grid, Kernels
from expertd.kernels.backends.streams import current_stream
from expertd.kernels.partitions import SMPartitions
from tests.kernels.helpers import random_contiguous

pytestmark = pytest.mark.gpu

# A CTA runs long enough for the others to need other SMs, so that every allowed SM gets some.
_SMID = r"""
extern "C" __global__ void record_smid(int* seen, long long cycles) {
    unsigned smid;
    asm volatile("mov.u32 %0, %smid;" : "=r"(smid));
    const long long start = clock64();
    while (clock64() - start < cycles) {}
    if (threadIdx.x == 0) seen[blockIdx.x] = smid;
}
"""
_CTAS = 132 * 64
_SHARED_BYTES = 200 * 1024  # one CTA an SM

SMIDs = Callable[[], set[int]]


@pytest.fixture(scope="module")
def record() -> Callable[[int, int], torch.Tensor]:
    """(CTAs, cycles per CTA) -> the SM of each CTA; runs on torch's current stream without waiting."""
    from cuda.bindings import driver
    from cuda.core import Device, LaunchConfig, Program, ProgramOptions, Stream, launch

    torch.cuda.synchronize()
    Device(0).set_current()
    program = Program(_SMID, "c++", ProgramOptions(arch="sm_90a", std="c++17"))
    kernel: Any = program.compile("cubin").get_kernel("record_smid")
    (status,) = driver.cuKernelSetAttribute(
        driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
        _SHARED_BYTES,
        kernel.handle,
        0,
    )
    assert status == driver.CUresult.CUDA_SUCCESS

    def run(ctas: int, cycles: int) -> torch.Tensor:
        seen = torch.full((ctas,), -1, dtype=torch.int32, device="cuda")
        config = LaunchConfig(grid=ctas, block=32, shmem_size=_SHARED_BYTES)
        stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
        launch(stream, config, kernel, seen.data_ptr(), np.int64(cycles))
        return seen

    return run


@pytest.fixture
def smids(record: Callable[[int, int], torch.Tensor]) -> SMIDs:
    """The SMs that a kernel of many CTAs ran on; runs on torch's current stream."""
    return lambda: set(record(_CTAS, 20_000).tolist())


@pytest.fixture
def partitions() -> Iterator[SMPartitions]:
    made = SMPartitions(0)
    yield made
    made.apply({})


def test_device_properties(partitions: SMPartitions) -> None:
    properties = torch.cuda.get_device_properties(0)
    assert partitions.device_name == properties.name
    assert partitions.total_sms == properties.multi_processor_count
    assert partitions.total_sms > partitions.granularity >= 2
    assert partitions.partitions == ()


@pytest.mark.parametrize(
    "sizes",
    [
        {"compute": 112, "communication": 20},
        {"a": 8},
        {"a": 30, "b": 40, "c": 50},
        {"a": 64, "b": 64},
        {"whole": 132},
    ],
)
def test_work_stays_inside_and_partitions_are_disjoint(
    partitions: SMPartitions, smids: SMIDs, sizes: dict[str, int]
) -> None:
    made = partitions.apply(sizes)
    assert made == partitions.partitions
    assert {partition.name: partition.requested_sms for partition in made} == sizes
    seen: set[int] = set()
    for partition in made:
        assert partition.num_sms >= partition.requested_sms
        assert partitions.num_sms(partition.name) == partition.num_sms
        with torch.cuda.stream(partitions.stream(partition.name)):
            for _ in range(3):
                own = smids()
                assert len(own) == partition.num_sms, f"{partition}: ran on {len(own)} SMs"
                assert seen.isdisjoint(own), f"{partition}: shares SMs {sorted(seen & own)}"
        seen |= own


def test_the_example_of_the_api_is_granted_to_the_sm(partitions: SMPartitions) -> None:
    made = partitions.apply({"compute": 112, "communication": 20})
    assert [partition.num_sms for partition in made] == [112, 20]


def test_none_is_the_whole_device(partitions: SMPartitions, smids: SMIDs) -> None:
    partitions.apply({"a": 64})
    assert partitions.stream(None) == torch.cuda.current_stream()
    assert partitions.num_sms(None) == partitions.total_sms
    assert len(smids()) == partitions.total_sms


def test_torch_work_is_slower_in_a_small_partition(partitions: SMPartitions) -> None:
    """torch does not report its SMs, but a product that takes several times as long must stay inside."""
    partitions.apply({"small": 16})
    x = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")

    def seconds(name: str | None) -> float:
        stream = partitions.stream(name)
        times = []
        with torch.cuda.stream(stream):
            for _ in range(3):
                start = time.perf_counter()
                for _ in range(20):
                    x @ x
                stream.synchronize()
                times.append(time.perf_counter() - start)
        return min(times)

    torch.cuda.synchronize()
    assert seconds("small") > 3 * seconds(None)


@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("rows", [[3, 0, 130, 77, 1], [900, 300, 1500], [700]])
@pytest.mark.parametrize("sizes", [{"compute": 112, "communication": 20}, {"pcie": 114}, {"h20": 78}])
def test_a_gemm_gives_the_same_bits_in_a_partition(
    partitions: SMPartitions, rows: list[int], sizes: dict[str, int], backend: str
) -> None:
    """Partitions stand in for the H100 PCIe and the H20, which have as many SMs or a few less."""
    case = random_contiguous(rows, 1536, 1024, "cuda")
    whole = grouped_gemm_contiguous(case.a, case.b, case.offsets, backend=backend)
    torch.cuda.synchronize()
    for partition in partitions.apply(sizes):
        with torch.cuda.stream(partitions.stream(partition.name)):
            out = grouped_gemm_contiguous(
                case.a, case.b, case.offsets, backend=backend, num_sms=partition.num_sms
            )
        partitions.stream(partition.name).synchronize()
        assert torch.equal(out.view(torch.int16), whole.view(torch.int16)), partition


def test_sizes_that_do_not_fit_change_nothing(partitions: SMPartitions, smids: SMIDs) -> None:
    before = partitions.apply({"a": 64})
    stream = partitions.stream("a")
    for sizes in ({"b": 133}, {"b": 64, "c": 72}, {"b": 0}, {"": 8}):
        with pytest.raises(ValueError, match="partitions"):
            partitions.apply(sizes)
    assert partitions.partitions == before
    assert partitions.stream("a") is stream
    with torch.cuda.stream(stream):
        assert len(smids()) == 64


def test_a_new_set_waits_for_work_in_flight(
    partitions: SMPartitions, record: Callable[[int, int], torch.Tensor], smids: SMIDs
) -> None:
    partitions.apply({"a": 64})
    old = partitions.stream("a")
    with torch.cuda.stream(old):
        seen = record(256, 200_000_000)  # several waves of a tenth of a second
    assert not old.query()
    partitions.apply({"a": 16, "b": 64})
    assert old.query()
    assert len(set(seen.tolist())) == 64
    with torch.cuda.stream(partitions.stream("a")):
        assert len(smids()) == 16


def test_an_old_stream_lives_while_it_is_referenced(partitions: SMPartitions, smids: SMIDs) -> None:
    partitions.apply({"a": 64})
    held = partitions.stream("a")
    partitions.apply({"b": 32})
    with torch.cuda.stream(held):
        assert len(smids()) == 64


def test_many_changes(partitions: SMPartitions, smids: SMIDs) -> None:
    for size in (8, 120, 16, 64, 24) * 4:
        partitions.apply({"a": size})
        with torch.cuda.stream(partitions.stream("a")):
            assert len(smids()) == size
    assert partitions.apply({}) == ()
    assert len(smids()) == partitions.total_sms


def test_changes_among_a_few_splits_keep_no_memory(partitions: SMPartitions, smids: SMIDs) -> None:
    """Neither of the GPU nor of the host, in 10,000 changes among twelve splits."""
    splits = [{"a": size, "b": 112 - size} for size in range(8, 80, 8)]
    splits += [{"a": 112, "b": 20}, {"b": 64}, {}]

    def change_all(times: int) -> tuple[int, int]:
        for split in splits * times:
            partitions.apply(split)
        torch.cuda.synchronize()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return torch.cuda.mem_get_info()[0], pages * os.sysconf("SC_PAGE_SIZE")

    gc.collect()  # kernels of other tests, which would give memory back meanwhile
    free, resident = change_all(10)
    free_later, resident_later = change_all(834)
    assert free_later >= free
    assert resident_later - resident < 2**20
    partitions.apply({"a": 64, "b": 48})
    seen = []
    for name in ("a", "b"):
        with torch.cuda.stream(partitions.stream(name)):
            seen.append(smids())
    assert [len(each) for each in seen] == [64, 48]
    assert seen[0].isdisjoint(seen[1])


def test_sets_of_sms_without_end_are_refused(
    partitions: SMPartitions, smids: SMIDs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver keeps memory of each; sizes from before go on."""
    monkeypatch.setattr("expertd.kernels.partitions.MAX_CONTEXTS", 5)
    for first in (8, 16):
        partitions.apply({"a": first, "b": 8})
    made = partitions.apply({"a": 8, "b": 24})
    with pytest.raises(
        ValueError, match=r"^partitions: expected at most 5 different sets of SMs since the start"
    ):
        partitions.apply({"a": 32, "b": 8})
    assert partitions.partitions == made
    assert [partition.num_sms for partition in partitions.apply({"a": 16, "b": 8})] == [16, 8]
    with torch.cuda.stream(partitions.stream("a")):
        assert len(smids()) == 16


@pytest.mark.parametrize("size", [8, 16, 64, 132])
def test_pairs_are_sorted_by_a_cluster_wherever_one_fits(partitions: SMPartitions, size: int) -> None:
    """By the driver's word, which knows how a partition's SMs lie."""
    kernels, num_groups = Kernels(), 24
    ids = torch.randint(-1, num_groups + 1, (5000, 1), dtype=torch.int32, device="cuda")
    partitions.apply({"a": size})
    with torch.cuda.stream(partitions.stream("a")):
        on = current_stream(0)
        found = compute_permutation(kernels, on, ids, num_groups, partitions.num_sms("a"))
        fits = kernels.has_room(on, VARIANT, Grid(1, 8, VARIANT.shared_bytes(num_groups)))
    torch.cuda.synchronize()
    print(f"{size} SMs: {'a cluster' if fits else 'one CTA'}")
    group = (
        ids.flatten().cpu().where((ids.flatten().cpu() >= 0) & (ids.flatten().cpu() < num_groups), num_groups)
    )
    order = group.argsort(stable=True)[: int((group < num_groups).sum())]
    expected = torch.full((5000,), -1, dtype=torch.int32)
    expected[order] = torch.arange(len(order), dtype=torch.int32)
    assert torch.equal(found.inverse.flatten().cpu(), expected)
    assert torch.equal(
        found.offsets.cpu()[1:], group.bincount(minlength=num_groups + 1)[:num_groups].cumsum(0)
    )


def test_an_unknown_partition(partitions: SMPartitions) -> None:
    with pytest.raises(ValueError, match="expected one of none at all, got 'a'"):
        partitions.stream("a")
    partitions.apply({"a": 8, "b": 8})
    with pytest.raises(ValueError, match="expected one of a, b, got 'c'"):
        partitions.num_sms("c")


def test_a_graph_stays_in_the_partition_it_was_captured_in(
    partitions: SMPartitions, record: Callable[[int, int], torch.Tensor], smids: SMIDs
) -> None:
    partitions.apply({"small": 16, "rest": 96})
    with torch.cuda.stream(partitions.stream("small")):
        inside = smids()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        seen = record(_CTAS, 20_000)
        graph.capture_end()
        graph.replay()
        torch.cuda.current_stream().synchronize()
    assert set(seen.tolist()) == inside
    seen.fill_(-1)
    torch.cuda.synchronize()
    graph.replay()  # on the whole device's stream
    torch.cuda.synchronize()
    assert set(seen.tolist()) == inside
