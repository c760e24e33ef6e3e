"""Every argument that the grouped GEMMs reject, with a message that has the expected and the actual value."""

from pathlib import Path
from typing import Any

import pytest
import torch

from expertd.backends import BACKENDS, Capabilities
from expertd.kernels import Backend, Quantized, backends, grouped_gemm_contiguous, grouped_gemm_masked, jit
from expertd.kernels.backends import (
    backend_names,
    capabilities_here,
    no_gpu,
    resolve_backend,
    why_not,
    why_on_cpu,
    why_reference,
)
from expertd.kernels.backends import cpu as of_cpu
from expertd.kernels.backends import triton as of_triton
from expertd.kernels.backends.cpu.instructions import Instructions
from expertd.kernels.backends.reference.backend import ReferenceBackend
from expertd.weight_format import WeightFormat

G, M, N, K = 3, 6, 136, 256


def _e4m3(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8).view(torch.float8_e4m3fn)


def _unaligned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the tensor that starts one element past an aligned address."""
    room = torch.zeros(tensor.numel() + 1, dtype=torch.uint8 if tensor.itemsize == 1 else torch.int16)
    return room[1:].view(tensor.dtype).view(tensor.shape)


def _contiguous_arguments() -> dict[str, Any]:
    return {
        "a": _e4m3(M, K),
        "a_scales": torch.ones(M, 2),
        "b": _e4m3(G, N, K),
        "b_scales": torch.ones(G, 2, 2),
        "offsets": torch.tensor([0, 1, 1, M], dtype=torch.int32),
        "out": torch.empty(M, N, dtype=torch.bfloat16),
    }


def _masked_arguments() -> dict[str, Any]:
    return {
        "a": _e4m3(G, M, K),
        "a_scales": torch.ones(G, M, 2),
        "b": _e4m3(G, N, K),
        "b_scales": torch.ones(G, 2, 2),
        "counts": torch.tensor([1, 0, M], dtype=torch.int32),
        "out": torch.empty(G, M, N, dtype=torch.bfloat16),
    }


def _quantized(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same arguments, with a and b as Quantized."""
    rest = dict(arguments)
    pairs = {name: Quantized(rest.pop(name), rest.pop(f"{name}_scales")) for name in ("a", "b")}
    return pairs | rest


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _spread(*strides: int) -> torch.Tensor:
    """Scales [M, 2] of rows far apart."""
    return torch.empty_strided((M, 2), strides, dtype=torch.float32, device="meta")


SHARED: list[tuple[dict[str, Any], str]] = [
    ({"b": _e4m3(N, K)}, r"b shape: expected 3 dimensions \[G, N, K\], got \(136, 256\)"),
    ({"b": _e4m3(G, N, 128)}, "a K: expected 128 as in b, got 256"),
    ({"b": _e4m3(G, 132, K)}, "N: expected a multiple of 8, at least 8, got 132"),
    ({"b": _e4m3(G, 0, K)}, "N: expected a multiple of 8, at least 8, got 0"),
    ({"b": torch.zeros(G, N, K)}, "b dtype: expected torch.float8_e4m3fn, got torch.float32"),
    ({"b": _e4m3(G, K, N).transpose(1, 2)}, r"b strides: expected contiguous, got \(34816, 1, 136\)"),
    ({"b": _unaligned(_e4m3(G, N, K))}, "b address: expected a multiple of 16 bytes, got 1 bytes past one"),
    ({"b_scales": torch.ones(G, 1, 2)}, r"b scales shape: expected \(3, 2, 2\), got \(3, 1, 2\)"),
    ({"b_scales": torch.ones(G, 2, 2).double()}, "b scales dtype: expected torch.float32, got torch.float64"),
    ({"b_scales": torch.ones(G, 2, 2).mT}, r"b scales strides: expected contiguous, got \(4, 1, 2\)"),
    ({"b_scales": _meta(G, 2, 2)}, "b scales device: expected cpu as a, got meta"),
    (
        {"b": _meta(G, N, K, dtype=torch.float8_e4m3fn), "backend": "reference"},
        "device: expected cpu, or those of `packed`, got meta",
    ),
    ({"num_sms": 0}, "num_sms: expected None or at least 1, got 0"),
    ({"num_sms": "a"}, "num_sms: expected None or at least 1, got a"),
    ({"b": _meta(G, 2**23 + 8, K, dtype=torch.float8_e4m3fn)}, "N: expected at most 8388608, got 8388616"),
    (
        {"backend": "metal"},
        r"backend: expected one of .*'hopper', 'triton', 'cpu', 'reference'.*, got 'metal'",
    ),
]

CONTIGUOUS: list[tuple[dict[str, Any], str]] = [
    (
        {
            "a": _meta(M, 2**31, dtype=torch.float8_e4m3fn),
            "b": _meta(G, N, 2**31, dtype=torch.float8_e4m3fn),
        },
        "K: expected at most 2147483520, got 2147483648",
    ),
    ({"a": _e4m3(G, M, K)}, r"a shape: expected 2 dimensions \[M, K\], got \(3, 6, 256\)"),
    ({"a": _e4m3(M, 200), "b": _e4m3(G, N, 200)}, "K: expected a multiple of 128, at least 128, got 200"),
    ({"a": _e4m3(M, 0), "b": _e4m3(G, N, 0)}, "K: expected a multiple of 128, at least 128, got 0"),
    ({"a": torch.zeros(M, K)}, "a dtype: expected torch.float8_e4m3fn, got torch.float32"),
    ({"a": _e4m3(K, M).t()}, r"a strides: expected contiguous, got \(1, 6\)"),
    ({"a": _unaligned(_e4m3(M, K))}, "a address: expected a multiple of 16 bytes, got 1 bytes past one"),
    ({"a_scales": torch.ones(M, 1)}, r"a scales shape: expected \(6, 2\), got \(6, 1\)"),
    ({"a_scales": torch.ones(M, 2).half()}, "a scales dtype: expected torch.float32, got torch.float16"),
    ({"a_scales": torch.ones(M, 4)[:, ::2]}, r"a scales strides: expected row- or .*, got \(4, 2\)"),
    ({"a_scales": _meta(M, 2)}, "a scales device: expected cpu as a, got meta"),
    (
        {"a_scales": _spread(2**30, 1)},
        r"a scales strides: expected at most 4294967295 elements apart in all, got \(1073741824, 1\)",
    ),
    (
        {"a_scales": _spread(1, 2**32)},
        r"a scales strides: expected at most 4294967295 .*, got \(1, 4294967296\)",
    ),
    ({"offsets": torch.zeros(G, dtype=torch.int32)}, r"offsets shape: expected \(4,\), got \(3,\)"),
    (
        {"offsets": torch.zeros(G + 1, dtype=torch.int64)},
        "offsets dtype: expected torch.int32, got torch.int64",
    ),
    (
        {"offsets": torch.zeros(8, dtype=torch.int32)[::2]},
        r"offsets strides: expected contiguous, got \(2,\)",
    ),
    ({"offsets": _meta(G + 1, dtype=torch.int32)}, "offsets device: expected cpu as a, got meta"),
    ({"out": torch.empty(M, N)}, "out dtype: expected torch.bfloat16, got torch.float32"),
    ({"out": torch.empty(M, 8, dtype=torch.bfloat16)}, r"out shape: expected \(6, 136\), got \(6, 8\)"),
    ({"out": torch.empty(N, M, dtype=torch.bfloat16).t()}, r"out strides: expected contiguous, got \(1, 6\)"),
    ({"out": _meta(M, N, dtype=torch.bfloat16)}, "out device: expected cpu as a, got meta"),
    (
        {"out": _unaligned(torch.empty(M, N, dtype=torch.bfloat16))},
        "out address: expected a multiple of 16 bytes, got 2 bytes past one",
    ),
    ({"b": _e4m3(1025, 8, K), "b_scales": torch.ones(1025, 1, 2)}, "b groups: expected 1 to 1024, got 1025"),
    ({"b": _e4m3(0, N, K), "b_scales": torch.ones(0, 2, 2)}, "b groups: expected 1 to 1024, got 0"),
]

MASKED: list[tuple[dict[str, Any], str]] = [
    ({"a": _e4m3(M, K)}, r"a shape: expected 3 dimensions \[G, max_m, K\], got \(6, 256\)"),
    ({"a": _e4m3(2, M, K)}, "a groups: expected 3 as in b, got 2"),
    ({"a": _e4m3(G, 0, K)}, "a max_m: expected at least 1, got 0"),
    ({"a_scales": torch.ones(M, G, 2)}, r"a scales shape: expected \(3, 6, 2\), got \(6, 3, 2\)"),
    ({"a_scales": torch.ones(G, M, 4)[..., ::2]}, r"a scales strides: expected row- or .*, got \(24, 4, 2\)"),
    ({"counts": torch.zeros(G + 1, dtype=torch.int32)}, r"counts shape: expected \(3,\), got \(4,\)"),
    ({"counts": torch.zeros(G)}, "counts dtype: expected torch.int32, got torch.float32"),
    ({"counts": _meta(G, dtype=torch.int32)}, "counts device: expected cpu as a, got meta"),
    ({"expected_m": 0}, "expected_m: expected None or at least 1, got 0"),
    ({"expected_m": "a"}, "expected_m: expected None or at least 1, got a"),
    (
        {"out": torch.empty(G * M, N, dtype=torch.bfloat16)},
        r"out shape: expected \(3, 6, 136\), got \(18, 136\)",
    ),
]


@pytest.mark.parametrize(("changes", "message"), SHARED + CONTIGUOUS)
def test_contiguous_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grouped_gemm_contiguous(**_quantized(_contiguous_arguments() | changes))


@pytest.mark.parametrize(("changes", "message"), SHARED + MASKED)
def test_masked_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grouped_gemm_masked(**_quantized(_masked_arguments() | changes))


@pytest.mark.parametrize(("name", "also"), [("a", ""), ("b", " or FourBits")])
def test_operands_without_their_scales_are_refused(name: str, also: str) -> None:
    for function, arguments in (
        (grouped_gemm_contiguous, _contiguous_arguments()),
        (grouped_gemm_masked, _masked_arguments()),
    ):
        with pytest.raises(
            ValueError, match=rf"^{name}: expected Quantized\(data, scales\){also}, got Tensor"
        ):
            function(**_quantized(arguments) | {name: arguments[name]})


def test_scales_may_be_row_or_column_major() -> None:
    arguments = _contiguous_arguments()
    column_major = torch.ones(2, M).t()
    assert torch.equal(
        grouped_gemm_contiguous(**_quantized(arguments)),
        grouped_gemm_contiguous(**_quantized(arguments | {"a_scales": column_major})),
    )


def test_out_is_returned_and_allocated_when_not_given() -> None:
    arguments = _contiguous_arguments()
    assert grouped_gemm_contiguous(**_quantized(arguments)) is arguments["out"]
    allocated = grouped_gemm_contiguous(**_quantized(arguments | {"out": None}))
    assert allocated.shape == (M, N)
    assert allocated.dtype == torch.bfloat16


def test_no_rows_return_an_empty_output() -> None:
    arguments = _contiguous_arguments() | {
        "a": _e4m3(0, K),
        "a_scales": torch.ones(0, 2),
        "offsets": torch.zeros(G + 1, dtype=torch.int32),
        "out": None,
    }
    assert grouped_gemm_contiguous(**_quantized(arguments)).shape == (0, N)


def test_a_backend_for_another_device_is_refused() -> None:
    class ElsewhereBackend(ReferenceBackend):
        name = "elsewhere"
        capabilities = Capabilities(device_type="cuda")

    with pytest.raises(ValueError, match="a device: expected cuda for backend 'elsewhere', got cpu"):
        grouped_gemm_contiguous(**_quantized(_contiguous_arguments() | {"backend": ElsewhereBackend()}))


def test_backends_are_found_by_name_and_shared() -> None:
    assert set(backend_names()) == {"hopper", "triton", "cpu", "reference"}
    reference = resolve_backend("reference")
    assert isinstance(reference, Backend)
    assert resolve_backend("reference") is reference


@pytest.mark.parametrize(
    ("raised", "slower", "why"),
    [
        (None, None, None),
        (None, "a CPU without AVX512-BF16", "a CPU without AVX512-BF16"),
        (ImportError("llvmlite"), None, "no llvmlite installed (expertd[cpu])"),
        (OSError("libgomp.so.1"), None, "no OpenMP of torch's: libgomp.so.1"),
    ],
)
def test_which_cpus_have_a_backend_of_their_own(
    raised: Exception | None,
    slower: str | None,
    why: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    instructions = of_cpu.program.instructions_here

    def found() -> Instructions:
        if raised is not None:
            raise raised
        return instructions()

    monkeypatch.setattr(of_cpu.program, "instructions_here", found)
    monkeypatch.setattr(of_cpu, "why_slower", lambda: slower)
    monkeypatch.setattr(backends, "_auto_choices", {})
    chosen, others = ("cpu", "") if why is None else ("reference", f"; cpu: {why}")
    with caplog.at_level("INFO"):
        for device in ("cpu", torch.device("cpu")):
            assert resolve_backend("auto", device) is resolve_backend(chosen)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        f"backend auto: {chosen} for device cpu (hopper: a cpu device; triton: a cpu device{others})"
    )
    assert capabilities_here("auto", torch.device("cpu")) is BACKENDS[chosen]
    assert why_reference() == (None if why is None else f"cpu: {why}")
    with caplog.at_level("INFO"):
        assert resolve_backend("auto", "cpu", {WeightFormat.FP8}) is resolve_backend(chosen)
        assert resolve_backend("auto", "cpu", {WeightFormat.FP8, WeightFormat.INT4}).name == "reference"
    _, line = [record.getMessage() for record in caplog.records]
    assert line.endswith(f"; cpu: {why if raised else 'no weights of INT4'})")
    assert why_not("cpu") == (None if raised is None else why), "the slower one can be asked for by name"


def test_whether_the_backend_of_cpus_can_run_is_known_without_its_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which takes LLVM most of a second, and most servers another backend."""
    monkeypatch.delattr(of_cpu.program, "Program")
    monkeypatch.delattr(of_cpu.program, "program")
    assert why_not("cpu") is None
    of_cpu.why_slower()


def test_the_backend_of_cpus_takes_no_other_tensors() -> None:
    assert why_not("cpu", torch.device("cuda", 0)) == "a cuda device"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@pytest.mark.parametrize("name", ["hopper", "triton"])
def test_a_backend_by_name_without_its_gpu_raises_with_the_reason(name: str) -> None:
    with pytest.raises(RuntimeError, match="expected a device that it can run on, got no CUDA device"):
        resolve_backend(name)


@pytest.mark.parametrize(
    ("capability", "packages", "hopper", "triton"),
    [
        ((9, 0), ("triton", "cuda.core"), None, None),
        ((8, 9), ("triton", "cuda.core"), "a GPU of compute capability 8.9 instead of 9.0", None),
        ((12, 0), ("triton", "cuda.core"), "a GPU of compute capability 12.0 instead of 9.0", None),
        (
            (7, 5),
            ("triton", "cuda.core"),
            "a GPU of compute capability 7.5 instead of 9.0",
            "a GPU of compute capability 7.5 instead of 8.x, 9.0 or 12.x",
        ),
        (
            (10, 0),
            ("triton", "cuda.core"),
            "a GPU of compute capability 10.0 instead of 9.0",
            "a GPU of compute capability 10.0 instead of 8.x, 9.0 or 12.x",
        ),
        ((8, 0), ("cuda.core",), "a GPU of compute capability 8.0 instead of 9.0", "no triton installed"),
        ((8, 0), ("triton",), "a GPU of compute capability 8.0 instead of 9.0", "no cuda.core installed"),
    ],
)
def test_which_gpus_backends_run_on(
    capability: tuple[int, int],
    packages: tuple[str, ...],
    hopper: str | None,
    triton: str | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv(jit.CACHE_DIR_VARIABLE, str(tmp_path))  # without compiled kernels
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(of_triton, "find_spec", lambda name: name if name in packages else None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    device = torch.device("cuda", 0)
    assert (why_not("hopper", device), why_not("triton", device)) == (hopper, triton)
    on_gpu = next((name for name, why in (("hopper", hopper), ("triton", triton)) if why is None), None)
    taken = capabilities_here("auto", device)
    assert taken is BACKENDS[on_gpu or "reference"], "for tensors on that GPU"
    assert capabilities_here("auto") in (taken, BACKENDS["cpu"]), "what a server takes by itself"
    assert why_on_cpu() == (None if on_gpu else f"hopper: {hopper}; triton: {triton}")


@pytest.mark.parametrize(
    ("driver", "build", "why"),
    [
        (None, "13.0", "no CUDA device"),
        (None, None, "no CUDA device"),
        ((12, 4), "13.0", "a driver for CUDA 12.4 instead of 13.0 or newer"),
        ((13, 0), "13.1", "no CUDA device"),
        ((13, 0), None, "a PyTorch that is built without CUDA"),
    ],
)
def test_without_a_cuda_device_the_driver_may_say_why(
    driver: tuple[int, int] | None, build: str | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", build)
    for module in (no_gpu, backends):
        monkeypatch.setattr(module, "driver_version", lambda: driver)
    assert (why_not("hopper"), why_not("triton")) == (why, why)
    assert why_on_cpu() == (f"hopper: {why}; triton: {why}" if driver or build else None)


@pytest.mark.parametrize(
    ("code", "version", "expected"), [(0, 12040, (12, 4)), (0, 13010, (13, 1)), (3, 0, None), (None, 0, None)]
)
def test_the_driver_says_its_version(
    code: int | None, version: int, expected: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Driver:
        def __init__(self, name: str) -> None:
            if code is None:
                raise OSError(f"{name}: cannot open shared object file")

        def cuDriverGetVersion(self, pointer: Any) -> int | None:  # noqa: N802
            pointer._obj.value = version
            return code

    monkeypatch.setattr("ctypes.CDLL", Driver)
    assert no_gpu.driver_version() == expected
