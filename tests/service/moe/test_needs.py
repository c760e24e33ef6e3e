"""The memory that a layer needs, what is free, and the sentence of a model that does not fit."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from expertd.activation import ExpertRule
from expertd.backends import BACKENDS
from expertd.kernels import resolve_backend
from expertd.service.device import device_of
from expertd.service.device.host_memory import free_host_bytes
from expertd.service.moe.layer import MoELayer
from expertd.service.moe.needs import needs_of, part_of_layer, together, weights_bytes
from expertd.service.moe.out_of_memory import in_one_sentence
from expertd.service.moe.request import zero_request
from expertd.service.moe.runner import LayerRunner
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.weights import random_weights
from tests.service.apps import MODEL, serving, tiny_settings
from tests.service.cgroups import V2, fake_groups

HOPPER, REFERENCE, IN_PLACE = BACKENDS["hopper"], BACKENDS["reference"], BACKENDS["cpu"]

SHAPE = LayerShape(hidden_size=1024, intermediate_size=512, num_experts=16, top_k=4, num_shared_experts=1)


def test_the_needs_have_their_parts() -> None:
    on_gpu, on_cpu = needs_of(SHAPE, 4096, HOPPER, staging=10_000_000), needs_of(SHAPE, 4096, REFERENCE)
    assert on_gpu.weights == weights_bytes(SHAPE) + 16 * 1024 * 6
    matrices = 3 * 17 * 1024 * 512
    assert on_cpu.weights == on_gpu.weights + matrices, "the CPU multiplies in bf16, and keeps no FP8"
    assert needs_of(SHAPE, 4096, REFERENCE, keeps_given=True).weights == on_gpu.weights + 2 * matrices
    assert needs_of(SHAPE, 1, REFERENCE).steps == matrices // 3, (
        "while one matrix is packed, the other is FP8"
    )
    for keeps_given in (False, True):
        in_place = needs_of(SHAPE, 4096, IN_PLACE, keeps_given=keeps_given)
        assert (in_place.weights, in_place.graphs) == (on_gpu.weights, 0), "it reads FP8 where it lies"
        assert in_place.steps == on_cpu.steps < on_gpu.steps, "of bf16 rows"
    biases = 17 * (2 * 512 + 1024) * 2
    assert needs_of(SHAPE, 4096, HOPPER, has_biases=True).weights == on_gpu.weights + biases
    weighing = 4096 * (4 + 4 + 1) * 1024 * 4
    weighs = needs_of(SHAPE, 4096, HOPPER, weighs_input=True, staging=10_000_000)
    assert weighs.steps == on_gpu.steps + weighing
    assert on_gpu.steps - needs_of(SHAPE, 4096, HOPPER).steps == 10_000_000
    assert on_cpu.graphs == 0 < on_gpu.graphs
    with_a_store = needs_of(SHAPE, 4096, HOPPER, num_graphs=4, graph_tokens=64).graphs
    assert 4 / 13 * on_gpu.graphs > with_a_store > 20_000_000
    of_four_ranks = needs_of(SHAPE, 4096, HOPPER, graph_tokens=4 * 256).graphs
    assert of_four_ranks - on_gpu.graphs == 3 * 256 * (
        2 * 4 * 1024 + 4 * 16 + 5 * (1536 + 48 + 2 * 1024 + 16)
    )
    assert needs_of(SHAPE, 4096, HOPPER, num_graphs=0).graphs == 0
    assert needs_of(SHAPE, 1024, HOPPER).steps < needs_of(SHAPE, 4096, HOPPER).steps
    assert str(on_cpu).startswith(f"{on_cpu.total / 1e6:.1f} MB (weights ")


def test_layers_share_memory_for_steps_and_graphs() -> None:
    each = [needs_of(SHAPE, tokens, HOPPER) for tokens in (1024, 4096)]
    both = together(each)
    assert both.weights == 2 * each[0].weights
    assert both.steps == each[1].steps > each[0].steps
    assert each[0].graphs < both.graphs < 2 * each[0].graphs
    assert together([]).total == 0
    part = needs_of(part_of_layer(SHAPE, 4), 4096, HOPPER)
    assert part.weights == each[0].weights - 12 * SHAPE.expert_bytes


@pytest.mark.parametrize(
    ("own", "folder", "version"),
    [
        ("0::/\n", "", 2),
        ("0::/a.slice/b.service\n", "a.slice/b.service", 2),
        ("0::/a.slice/b.service\n", "a.slice", 2),
        ("0::/not/here\n", "", 2),
        ("7:cpuset:/\n4:cpu,memory:/a/b\n", "a/b", 1),
        ("4:memory:/not/here\n", "", 1),
    ],
)
def test_the_limit_of_a_container_or_service_counts(
    tmp_path: Path, own: str, folder: str, version: int
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9000 kB\nMemAvailable:    4000 kB\n")
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    group = f"cg/{folder}"
    files = {f"{group}/{names[1]}": "3000000\n", f"{group}/memory.stat": f"anon 7\n{names[2]} 500000\n"}
    mounts = [("/", "cg", V2 if version == 2 else ("cgroup", "rw,cpu,memory"))]
    for most, free in (("max", 4_096_000), ("4000000", 1_500_000), ("2000000", 0), ("90000000", 4_096_000)):
        proc = fake_groups(tmp_path, own, mounts, {**files, f"{group}/{names[0]}": f"{most}\n"})
        assert free_host_bytes(meminfo, proc) == free
    assert free_host_bytes(meminfo, tmp_path / "none") == 4_096_000


@pytest.mark.gpu
@pytest.mark.parametrize("weighs_input", [False, True])
def test_a_layer_on_a_gpu_needs_no_more_than_was_computed(weighs_input: bool) -> None:
    device, tokens = torch.device("cuda", 0), 4096
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    rule = ExpertRule(weighs_input=weighs_input)
    layer = MoELayer(SHAPE, random_weights(SHAPE, 0, device), resolve_backend("hopper"), rule=rule)
    runner = LayerRunner(layer, device_of(device))
    runner.run([zero_request(tokens, SHAPE.hidden_size)])
    used = torch.cuda.max_memory_allocated(device) - before
    assert used <= needs_of(SHAPE, tokens, HOPPER, weighs_input=weighs_input).total


SMALL = LayerShape(hidden_size=256, intermediate_size=128, num_experts=4, top_k=2, num_shared_experts=1)
CPU = device_of("cpu")
NEEDS = needs_of(SMALL, 16, REFERENCE)


def test_the_bytes_of_weights() -> None:
    weights = random_weights(SMALL, 0, "cpu")
    tensors = (weights.gate_up.data, weights.gate_up.scales, weights.down.data, weights.down.scales)
    # A router's bytes are those of float32, which is the widest that it may have.
    router = weights.router.numel() * 4
    assert weights_bytes(SMALL) == router + sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize(
    "fail",
    [
        lambda: torch.empty(2**60, dtype=torch.uint8),
        lambda: torch.empty((2**62, 2**62)),
        lambda: torch.empty(2**62, dtype=torch.float64),
        lambda: _raise(torch.OutOfMemoryError("CUDA out of memory")),
        lambda: _raise(MemoryError()),
    ],
)
def test_every_error_of_an_allocation_says_what_was_needed(fail: Callable[[], object]) -> None:
    expected = rf"model a: expected {re.escape(str(NEEDS))} of free memory, got \d+\.\d MB"
    with pytest.raises(MemoryError, match=f"^{expected}$"), in_one_sentence("a", NEEDS, CPU):
        fail()


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match=r"^a kernel failed$"), in_one_sentence("a", NEEDS, CPU):
        raise RuntimeError("a kernel failed")


async def test_a_server_logs_the_sentence_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    # More than any address space, whatever the system lets a process allocate.
    model: dict[str, Any] = {**MODEL, "hidden_size": 128 << 40}
    async with serving(tiny_settings({"max_body_bytes": 1 << 60}, models=[model])) as server:
        assert server.app.engine.loaded is None
    (record,) = [record for record in caplog.records if record.message.startswith("loading failed")]
    assert re.search(r"model tiny: expected \d+\.\d MB \(weights .*\) of free memory, got", record.message)
    assert not record.exc_info


@pytest.mark.gpu
def test_a_full_gpu_is_reported_likewise() -> None:
    device = torch.device("cuda", 0)
    with pytest.raises(MemoryError, match=r"^model a: expected .*, got \d+\.\d MB$"):  # noqa: SIM117
        with in_one_sentence("a", NEEDS, device_of(device)):
            torch.empty(2**50, dtype=torch.uint8, device=device)


def _raise(error: Exception) -> None:
    raise error
