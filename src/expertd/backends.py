"""The registry of backends, and what each one can do; imports no torch."""

from dataclasses import dataclass

from expertd.limits import HIDDEN_STEP
from expertd.weight_format import WeightFormat

_FP8 = frozenset({WeightFormat.FP8})
_ALL = frozenset(WeightFormat)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What callers ask about a backend instead of its name; the defaults are the least.

    device_type     the only device type ("cpu", "cuda") whose tensors it accepts, and where a server's layers
                    are; None: any, and a server's are on a CPU
    packs           formats of weights of which calls read a copy, see `Backend.packed`
    weight_bytes    memory of a value in such a copy; None: as much as in the format
    keeps_bf16      activations stay bf16 on a CPU, and are not rounded to FP8
    captures        calls can be captured in graphs
    request_table   has `gather_rows` and `scatter_rows`: with `captures`, small steps are one graph each
    device_calls    has `call_graph`: with `request_table`, GPUs of callers make calls by themselves
    joint_exchange  has `parallel_experts`: the GPUs of a host share a layer
    partitions      has `partitions`, and `num_sms` limits its launches
    routes_bf16     `route` has exact fp32 logits if hidden states and the router are bf16
    compiles        its kernels are compiled just in time, and `kernels.jit` keeps them
    hidden_step     a hidden size is a multiple of it
    max_n           the largest N of a GEMM
    weight_formats  those of experts' weights that calls take
    """

    device_type: str | None = None
    packs: frozenset[WeightFormat] = frozenset()
    weight_bytes: int | None = None
    keeps_bf16: bool = False
    captures: bool = False
    request_table: bool = False
    device_calls: bool = False
    joint_exchange: bool = False
    partitions: bool = False
    routes_bf16: bool = False
    compiles: bool = False
    hidden_step: int = HIDDEN_STEP
    max_n: int = 2**23
    weight_formats: frozenset[WeightFormat] = _FP8

    @property
    def stores_packed(self) -> frozenset[WeightFormat]:
        """Formats of which an expert store has such copies alone: those that `Backend.room` has room for."""
        return self.packs if self.weight_bytes is None else frozenset()

    @property
    def on_gpu(self) -> bool:
        """Whether a server's layers are in the memory of a GPU."""
        return self.device_type not in (None, "cpu")


BACKENDS = {
    "hopper": Capabilities(
        device_type="cuda",
        packs=_ALL - _FP8,
        captures=True,
        request_table=True,
        device_calls=True,
        joint_exchange=True,
        partitions=True,
        routes_bf16=True,
        compiles=True,
        hidden_step=16,  # TMA copies 16 bytes at a time, and FP8 has one for each column
        max_n=2**23,  # 2**18 columns of the narrowest tiles: with more, csrc/scheduler.cuh divides inexactly
        weight_formats=_ALL,
    ),
    "triton": Capabilities(
        device_type="cuda",
        captures=True,
        request_table=True,
        partitions=True,
        routes_bf16=True,
        compiles=True,
        weight_formats=_ALL,
    ),
    "cpu": Capabilities(device_type="cpu", keeps_bf16=True),
    "reference": Capabilities(packs=_ALL, weight_bytes=2, keeps_bf16=True, weight_formats=_ALL),
}
"""By name, which is also that of a folder of `kernels/backends`; "auto" tries them in this order."""


def with_joint_exchange() -> str:
    """The names of the backends whose GPUs share a layer, for errors."""
    return " or ".join(name for name, can in BACKENDS.items() if can.joint_exchange)


def taking(weight_format: WeightFormat) -> str:
    """The names of the backends that take weights of this format, for errors."""
    return " or ".join(name for name, can in BACKENDS.items() if weight_format in can.weight_formats)
