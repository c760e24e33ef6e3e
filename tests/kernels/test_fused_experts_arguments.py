"""Wrong arguments of `fused_experts`: what was expected, and what came."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from expertd.backends import BACKENDS
from expertd.kernels import Quantized, fused_experts, quantize_rows
from expertd.kernels.ops.activation import OtherGlu, Swiglu
from expertd.kernels.ops.biases import ExpertBiases

MAX_N = BACKENDS["hopper"].max_n


def _e4m3(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8).view(torch.float8_e4m3fn)


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


ROWS, SCALES = quantize_rows(torch.zeros(4, 256)), torch.ones(2, 2, 2)
GATE_UP, DOWN = Quantized(_e4m3(2, 256, 256), SCALES), Quantized(_e4m3(2, 256, 128), torch.ones(2, 2, 1))
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"hidden_states": torch.zeros(4)}, r"hidden_states shape: expected 2 dimensions \[T, H\], got \(4,\)"),
    ({"hidden_states": torch.zeros(4, 256).double()}, "hidden_states dtype: expected torch.bfloat16 or .*64"),
    ({"hidden_states": torch.zeros(4, 200)}, "H: expected a multiple of 16, at least 128, got 200"),
    (
        {"hidden_states": Quantized(torch.zeros(4, 256), torch.ones(4, 2))},
        "hidden_states dtype: expected torch.float8_e4m3fn, got torch.float32",
    ),
    (
        {"hidden_states": quantize_rows(torch.zeros(4, 384))._replace(scales=torch.ones(4, 2))},
        r"hidden_states scales shape: expected \(4, 3\), got \(4, 2\)",
    ),
    (
        {"hidden_states": ROWS._replace(scales=torch.ones(4, 2).half())},
        "hidden_states scales dtype: expected torch.float32, got torch.float16",
    ),
    (
        {"hidden_states": Quantized(torch.zeros(4, 144).to(torch.float8_e4m3fn), torch.ones(4, 2))},
        "H: expected a multiple of 128, at least 128, got 144",
    ),
    ({"hidden_states": torch.zeros(4, 128)}, r"gate_up shape: expected \(2, 256, 128\), got \(2, 256, 256\)"),
    ({"hidden_states": _meta(4, 256)}, "gate_up device: expected meta as hidden_states, got cpu"),
    ({"topk_ids": torch.zeros(4).int()}, r"topk_ids shape: expected 2 dimensions \[T, top_k\], got \(4,\)"),
    ({"topk_ids": torch.zeros(4, 0).int()}, "topk_ids top_k: expected at least 1, got 0"),
    ({"topk_ids": torch.zeros(3, 2).int()}, r"topk_ids shape: expected \(4, 2\), got \(3, 2\)"),
    ({"topk_ids": torch.zeros(4, 2).long()}, "topk_ids dtype: expected torch.int32, got torch.int64"),
    ({"topk_ids": torch.zeros(2, 4).int().t()}, r"topk_ids strides: expected contiguous, got \(1, 4\)"),
    (
        {"topk_ids": _meta(4, 2, dtype=torch.int32)},
        "topk_ids device: expected cpu as hidden_states, got meta",
    ),
    (
        {"topk_ids": torch.zeros(1, dtype=torch.int32).expand(4, 2**29)},
        "topk_ids rows: expected at most 2147483647, got 2147483648",
    ),
    ({"topk_weights": torch.zeros(4, 3)}, r"topk_weights shape: expected \(4, 2\), got \(4, 3\)"),
    ({"topk_weights": torch.zeros(4, 2).half()}, "topk_weights dtype: expected torch.float32, got .*16"),
    ({"topk_weights": torch.zeros(2, 4).t()}, r"topk_weights strides: expected contiguous, got \(1, 4\)"),
    ({"topk_weights": _meta(4, 2)}, "topk_weights device: expected cpu as hidden_states, got meta"),
    ({"down": tuple(DOWN)}, r"down: expected Quantized\(data, scales\) or FourBits, got tuple"),
    ({"gate_up": _e4m3(2, 256, 256)}, r"gate_up: expected Quantized\(data, scales\) or FourBits, got Tensor"),
    ({"down": DOWN._replace(data=_e4m3(256, 128))}, r"down shape: expected 3 dimensions \[G, H, I\], got"),
    ({"down": DOWN._replace(data=_e4m3(2, 256, 64))}, "I: expected a multiple of 128, at least .*, got 64"),
    ({"down": DOWN._replace(data=_e4m3(0, 256, 128))}, "down groups: expected 1 to 1024, got 0"),
    ({"down": DOWN._replace(data=_e4m3(2, 384, 128))}, r"down shape: expected \(2, 256, 128\), got"),
    (
        {"down": DOWN._replace(scales=torch.ones(2, 1))},
        r"down scales shape: expected \(2, 2, 1\), got \(2, 1\)",
    ),
    ({"gate_up": GATE_UP._replace(data=_e4m3(2, 512, 256))}, r"gate_up shape: expected \(2, 256, 256\), got"),
    ({"gate_up": GATE_UP._replace(data=torch.zeros(2, 256, 256))}, "gate_up dtype: expected .*e4m3fn, got"),
    ({"gate_up": GATE_UP._replace(data=_e4m3(2, 256, 256).mT)}, "gate_up strides: expected contiguous, got"),
    ({"gate_up": GATE_UP._replace(scales=SCALES.half())}, "gate_up scales dtype: expected .*32, got"),
    ({"gate_up": GATE_UP._replace(scales=SCALES.mT)}, "gate_up scales strides: expected contiguous"),
    (
        {"gate_up": GATE_UP._replace(scales=_meta(2, 2, 2))},
        "gate_up scales device: expected cpu as hidden_states",
    ),
    ({"num_sms": 0}, "num_sms: expected None or at least 1, got 0"),
    (
        {"backend": "metal"},
        r"backend: expected one of .*'hopper', 'triton', 'cpu', 'reference'.*, got 'metal'",
    ),
    ({"activation": Swiglu(alpha=math.nan)}, "activation alpha: expected a finite number, got nan"),
    ({"activation": Swiglu(limit=0.0)}, "activation limit: expected above 0, got 0.0"),
    (
        {"biases": ExpertBiases(torch.zeros(2, 128).bfloat16(), torch.zeros(2, 256).bfloat16())},
        r"gate_up bias shape: expected \(2, 256\), got \(2, 128\)",
    ),
    (
        {"biases": ExpertBiases(torch.zeros(2, 256).bfloat16(), torch.zeros(2, 256))},
        "down bias dtype: expected torch.bfloat16, got torch.float32",
    ),
    ({"out": torch.zeros(4, 128)}, r"out shape: expected \(4, 256\), got \(4, 128\)"),
    ({"out": torch.zeros(4, 256).double()}, "out dtype: expected torch.bfloat16 or .*, got torch.float64"),
    ({"out": torch.zeros(256, 4).t()}, r"out strides: expected contiguous, got \(1, 4\)"),
    ({"out": torch.zeros(4 * 256 + 1)[1:].view(4, 256)}, "out address: expected a multiple of 16 bytes"),
    ({"out": _meta(4, 256)}, "out device: expected cpu as hidden_states, got meta"),
    (
        {"biases": (torch.zeros(2, 256), torch.zeros(2, 256))},
        r"biases: expected None or ExpertBiases\(gate_up, down\), got tuple",
    ),
    ({"activation": (1.0, 2.0)}, "activation: expected Swiglu or OtherGlu, got tuple"),
    ({"activation": OtherGlu(up_offset=math.nan)}, "activation up_offset: expected a finite number, got nan"),
    ({"num_sms": "a"}, "num_sms: expected None or at least 1, got a"),
    (
        {"hidden_states": ROWS._replace(scales=_meta(4, 2**32)[:, :2])},
        r"hidden_states scales strides: expected at most 4294967295 each, got \(4294967296, 1\)",
    ),
    (
        {
            "hidden_states": _meta(4, MAX_N + 128),
            "down": Quantized(_meta(2, MAX_N + 128, 128, dtype=torch.float8_e4m3fn), _meta(2, 65537, 1)),
        },
        "H: expected at most 8388608, got 8388736",
    ),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_wrong_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "hidden_states": torch.zeros(4, 256),
        "topk_ids": torch.zeros(4, 2, dtype=torch.int32),
        "topk_weights": torch.zeros(4, 2),
        "gate_up": GATE_UP,
        "down": DOWN,
        "backend": "reference",
    }
    with pytest.raises(ValueError, match=message):
        fused_experts(**(arguments | change))
