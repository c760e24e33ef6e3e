"""Checkpoints of four bits in their publishers' own files, and what their layers are in float64.

Each has what its publisher writes: the names, dtypes and shapes of tensors, also of those beside the experts,
and config.json with its quantization_config. Sizes are small, and the numbers random.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import silu, softplus

from expertd.service.checkpoints import resolve_checkpoints
from expertd.service.settings.model import Settings
from expertd.weight_format import WeightFormat
from tests.service.apps import hidden_request, output_of, serving, tiny_settings
from tests.service.checkpoints.encoders import (
    Encoder,
    awq,
    bf16,
    fp8_by_block,
    gptq,
    int4,
    mxfp4,
    nvfp4,
    nvfp4_packed,
)  # fmt: skip

HIDDEN, SIZE, EXPERTS, TOP_K, LAYER, TOKENS = 256, 128, 8, 3, 1, 24
Tensors = dict[str, Tensor]
Expert = tuple[Tensor, Tensor, Tensor]
Choose = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
Said = dict[str, Any]


def _chosen(scores: Tensor, weights: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """The experts with the highest scores, and their weights, which add up to `scale`."""
    ids = scores.topk(TOP_K).indices
    taken = weights.gather(1, ids)
    return ids, scale * taken / taken.sum(1, keepdim=True)


def softmax(logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return _chosen(logits, logits.softmax(1))


def softmax_of_biased(logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    assert bias is not None
    return softmax(logits + bias, None)


def sigmoid(logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    assert bias is not None
    return _chosen(logits.sigmoid() + bias, logits.sigmoid(), 2.827)


def sqrtsoftplus(logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    assert bias is not None
    return _chosen(softplus(logits).sqrt() + bias, softplus(logits).sqrt(), 1.5)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


def clamped(gate: Tensor, up: Tensor) -> Tensor:
    """DeepSeek-V4's, with a limit that random numbers reach."""
    return silu(gate.clamp(max=0.7)) * up.clamp(-0.7, 0.7)


def gpt_oss_activation(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.clamp(max=0.7)
    return gate * (1.702 * gate).sigmoid() * (up.clamp(-0.7, 0.7) + 1)


@dataclass(frozen=True)
class Vendor:
    """A publisher's checkpoint.

    config  of config.json, beside sizes; files: others in JSON
    start   of the names of a layer's tensors
    block   in which the router (`gate`) and `experts` are, with gate, up and down by `projections`
    encode  of routed experts; shared: the shared one's, if there is one, and its name
    bias    the name of what is added to logits or scores, and its dtype
    beside  the shapes of other tensors of the layer, which are nobody's business
    """

    format: WeightFormat
    config: Said
    encode: Encoder
    choose: Choose = softmax
    act: Callable[[Tensor, Tensor], Tensor] = swiglu
    start: str = f"model.layers.{LAYER}."
    block: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: tuple[str, Encoder] | None = None
    bias: tuple[str, torch.dtype] | None = None
    beside: Mapping[str, tuple[int, ...]] = field(
        default_factory=lambda: {"self_attn.q_proj.weight": (32, 64)}
    )
    files: Mapping[str, Said] = field(default_factory=dict)


@dataclass(frozen=True)
class Written:
    """A layer as it was written: what its numbers mean, and the bytes of the routed experts' tensors."""

    router: Tensor
    bias: Tensor | None
    experts: list[Expert]
    biases: tuple[Tensor, Tensor] | None
    shared: list[Expert]
    num_bytes: int


def _linear(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator).mul_(shape[-1] ** -0.5)


def _save(directory: Path, vendor: Vendor, tensors: Tensors) -> None:
    tensors |= {f"{vendor.start}{name}": torch.zeros(shape) for name, shape in vendor.beside.items()}
    tensors["lm_head.weight"] = torch.zeros(4, HIDDEN)
    save_file({name: each.contiguous() for name, each in tensors.items()}, directory / "model.safetensors")
    for name, values in {"config.json": vendor.config, **vendor.files}.items():
        (directory / name).write_text(json.dumps(values))


def write(directory: Path, name: str, generator: torch.Generator) -> Written:
    """Write the checkpoint `name` of VENDORS."""
    vendor = VENDORS[name]
    return (_write_stacks if "gpt-oss" in name else _write)(directory, vendor, generator)


def _write(directory: Path, vendor: Vendor, generator: torch.Generator) -> Written:
    """Experts in tensors of their own."""
    tensors: Tensors = {}

    def expert(name: str, encode: Encoder) -> tuple[Expert, int]:
        meant, num_bytes = [], 0
        for projection, shape in zip(
            vendor.projections, [(SIZE, HIDDEN)] * 2 + [(HIDDEN, SIZE)], strict=True
        ):
            stored, values = encode(_linear(generator, *shape))
            own = {
                f"{vendor.start}{vendor.block}.{name}.{projection}{at}": each for at, each in stored.items()
            }
            tensors.update(own)
            num_bytes += sum(
                each.nbytes for at, each in stored.items() if each.dim() == 2 and at != ".qzeros"
            )
            meant.append(values.double())
        gate, up, down = meant
        return (gate, up, down), num_bytes

    routed = [expert(f"experts.{index}", vendor.encode) for index in range(EXPERTS)]
    shared = [] if vendor.shared is None else [expert(*vendor.shared)[0]]
    router = _linear(generator, EXPERTS, HIDDEN).to(torch.bfloat16)
    tensors[f"{vendor.start}{vendor.block}.gate.weight"] = router
    bias = None
    if vendor.bias is not None:
        bias = (torch.randn(EXPERTS, generator=generator) / 4).to(vendor.bias[1])
        tensors[f"{vendor.start}{vendor.block}.{vendor.bias[0]}"] = bias
    _save(directory, vendor, tensors)
    experts, num_bytes = [each for each, _ in routed], sum(number for _, number in routed)
    return Written(router, bias, experts, None, shared, num_bytes)


def _write_stacks(directory: Path, vendor: Vendor, generator: torch.Generator) -> Written:
    """All experts in a tensor each: gates and ups in turns, 16 bytes to a scale, and biases."""
    tensors: Tensors = {}
    start, num_bytes, meant, biases = f"{vendor.start}mlp.", 0, [], []
    for name, (n, k) in {"gate_up_proj": (2 * SIZE, HIDDEN), "down_proj": (HIDDEN, SIZE)}.items():
        encoded = [mxfp4(_linear(generator, n, k)) for _ in range(EXPERTS)]
        codes = torch.stack([stored[".weight"].view(torch.uint8) for stored, _ in encoded])
        scales = torch.stack([stored[".scale"].view(torch.uint8) for stored, _ in encoded])
        bias = (torch.randn(EXPERTS, n, generator=generator) / 2).to(torch.bfloat16)
        tensors |= {
            f"{start}experts.{name}_blocks": codes.view(EXPERTS, n, k // 32, 16),
            f"{start}experts.{name}_scales": scales, f"{start}experts.{name}_bias": bias,
        }  # fmt: skip
        num_bytes += codes.nbytes + scales.nbytes
        meant.append([values.double() for _, values in encoded])
        biases.append(bias.double())
    router = _linear(generator, EXPERTS, HIDDEN).to(torch.bfloat16)
    bias = torch.randn(EXPERTS, generator=generator).to(torch.bfloat16)
    tensors |= {f"{start}router.weight": router, f"{start}router.bias": bias}
    _save(directory, vendor, tensors)
    experts = [(both[0::2], both[1::2], down) for both, down in zip(*meant, strict=True)]
    return Written(router, bias, experts, (biases[0], biases[1]), [], num_bytes)


def expected_rows(name: str, layer: Written, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The layer in float64, and which tokens have experts that rounding of scores cannot change."""
    vendor = VENDORS[name]
    x = tokens.double()
    logits = x @ layer.router.double().T
    bias = None if layer.bias is None else layer.bias.double()
    ids, weights = vendor.choose(logits, bias)
    others, _ = vendor.choose(logits + 1e-5 * torch.randn(logits.shape, dtype=torch.float64), bias)
    is_clear = (ids.sort(1).values == others.sort(1).values).all(1)
    out = torch.zeros_like(x)
    for row, (own, of_slots) in enumerate(zip(ids.tolist(), weights, strict=True)):
        for index, weight in zip(own, of_slots, strict=True):
            out[row] += weight * _expert(vendor, layer.experts[index], x[row], layer.biases, index)
    for shared in layer.shared:
        out += _expert(vendor, shared, x, None, 0)
    return out, is_clear


def _expert(
    vendor: Vendor, expert: Expert, x: Tensor, biases: tuple[Tensor, Tensor] | None, index: int
) -> Tensor:
    gate, up, down = (x.new_zeros(()) for _ in range(3)) if biases is None else (
        biases[0][index, 0::2], biases[0][index, 1::2], biases[1][index]
    )  # fmt: skip
    inner = vendor.act(x @ expert[0].T + gate, x @ expert[1].T + up)
    out: Tensor = inner @ expert[2].T + down
    return out


def _sizes(**more: Any) -> Said:
    return {
        "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_experts_per_tok": TOP_K, "hidden_act": "silu",
        "vocab_size": 4, "rms_norm_eps": 1e-6, **more,
    }  # fmt: skip


_DEEPSEEK: Said = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "first_k_dense_replace": 1,
    "intermediate_size": 384, "moe_intermediate_size": SIZE, "moe_layer_freq": 1, "n_group": 1,
    "topk_group": 1, "n_routed_experts": EXPERTS, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_nextn_predict_layers": 0, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}  # fmt: skip


def _compressed(weights: Said, form: str, ignore: list[str], activations: Said | None = None) -> Said:
    """compressed-tensors'."""
    rest = {"actorder": None, "block_structure": None, "dynamic": False, "observer": "minmax"}
    group = {"input_activations": activations, "output_activations": None, "targets": ["Linear"]}
    return {
        "config_groups": {"group_0": {**group, "weights": {**rest, "symmetric": True, **weights}}},
        "format": form, "ignore": ignore, "kv_cache_scheme": None, "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }  # fmt: skip


_KIMI_INT4 = _compressed(
    {"group_size": 32, "num_bits": 4, "observer_kwargs": {}, "strategy": "group", "type": "int"},
    "pack-quantized",
    ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
)
_KIMI_BESIDE = {"self_attn.q_a_proj.weight": (32, 64), "post_attention_layernorm.weight": (HIDDEN,)}
_V4: Said = _sizes(
    architectures=["DeepseekV4ForCausalLM"], model_type="deepseek_v4", expert_dtype="fp4",
    moe_intermediate_size=SIZE, n_routed_experts=EXPERTS, n_shared_experts=1, norm_topk_prob=True,
    num_hash_layers=1, num_nextn_predict_layers=1, routed_scaling_factor=1.5, scoring_func="sqrtsoftplus",
    swiglu_limit=0.7, topk_method="noaux_tc",
    quantization_config={
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
)  # fmt: skip
_QWEN3 = _sizes(
    architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", decoder_sparse_step=1,
    intermediate_size=384, mlp_only_layers=[0], moe_intermediate_size=SIZE, norm_topk_prob=True,
    num_experts=EXPERTS,
)  # fmt: skip
_ACTIVATIONS_4 = {
    "dynamic": "local",
    "group_size": 16,
    "num_bits": 4,
    "strategy": "tensor_group",
    "type": "float",
}


def _fp8_of_v4(weight: Tensor) -> tuple[Tensors, Tensor]:
    """Blocks of e4m3 with scales in e8m0, named as DeepSeek names them."""
    stored, _ = fp8_by_block(weight)
    scales = torch.exp2(stored[".weight_scale"].log2().ceil())
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    data = (weight / spread).to(torch.float8_e4m3fn)
    return {".weight": data, ".scale": scales.to(torch.float8_e8m0fnu)}, data.float() * spread


VENDORS: dict[str, Vendor] = {
    "openai/gpt-oss-20b": Vendor(
        WeightFormat.MXFP4,
        _sizes(
            architectures=["GptOssForCausalLM"], model_type="gpt_oss", experts_per_token=TOP_K,
            intermediate_size=SIZE, num_local_experts=EXPERTS, output_router_logits=False, swiglu_limit=0.7,
            router_aux_loss_coef=0.9,
            quantization_config={
                "modules_to_not_convert": [
                    "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
                ],
                "quant_method": "mxfp4",
            },
        ),
        mxfp4, softmax_of_biased, gpt_oss_activation,
        beside={"self_attn.sinks": (4,), "self_attn.q_proj.bias": (64,)},
    ),
    "moonshotai/Kimi-K2-Thinking": Vendor(
        WeightFormat.INT4, _sizes(**_DEEPSEEK, quantization_config=_KIMI_INT4), int4, sigmoid,
        shared=("shared_experts", bf16), bias=("gate.e_score_correction_bias", torch.float32),
        beside=_KIMI_BESIDE,
    ),
    "moonshotai/Kimi-K2.5": Vendor(
        WeightFormat.INT4,
        {
            "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25",
            "text_config": _sizes(**_DEEPSEEK, quantization_config=_KIMI_INT4),
            "vision_config": {"model_type": "moonvit", "hidden_size": 64},
        },
        int4, sigmoid, start=f"language_model.model.layers.{LAYER}.",
        shared=("shared_experts", bf16), bias=("gate.e_score_correction_bias", torch.float32),
        beside=_KIMI_BESIDE,
    ),
    "deepseek-ai/DeepSeek-V4-Flash": Vendor(
        WeightFormat.MXFP4, _V4, mxfp4, sqrtsoftplus, clamped, start=f"layers.{LAYER}.", block="ffn",
        projections=("w1", "w3", "w2"), shared=("shared_experts", _fp8_of_v4),
        bias=("gate.bias", torch.float32),
        beside={"attn.wq_a.weight": (32, 64), "attn.attn_sink": (4,), "ffn_norm.weight": (HIDDEN,),
                "hc_ffn_base": (4,), "hc_ffn_fn": (4, 8), "hc_ffn_scale": (1,)},
    ),
    "nvidia/Qwen3-30B-A3B-NVFP4": Vendor(
        WeightFormat.NVFP4, _QWEN3, nvfp4, beside={"self_attn.k_proj.k_scale": ()},
        files={"hf_quant_config.json": {
            "producer": {"name": "modelopt", "version": "0.33.0"},
            "quantization": {
                "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16,
                "exclude_modules": ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"],
            },
        }},
    ),
    "nvidia/DeepSeek-V4-Flash-NVFP4": Vendor(
        WeightFormat.NVFP4,
        _V4 | {"quantization_config": _V4["quantization_config"] | {
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {f"layers.{LAYER}.ffn.experts": {"group_size": 16, "quant_algo": "NVFP4"}},
        }},
        nvfp4, sqrtsoftplus, clamped, start=f"layers.{LAYER}.", block="ffn", projections=("w1", "w3", "w2"),
        shared=("shared_experts", _fp8_of_v4), bias=("gate.bias", torch.float32),
    ),
    "RedHatAI/Qwen3-30B-A3B-NVFP4": Vendor(
        WeightFormat.NVFP4,
        _QWEN3 | {"quantization_config": _compressed(
            {"group_size": 16, "num_bits": 4, "strategy": "tensor_group", "type": "float"},
            "nvfp4-pack-quantized", ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "lm_head"],
            _ACTIVATIONS_4,
        )},
        lambda weight: _with_input(nvfp4_packed(weight)),
    ),
    "Qwen/Qwen3-30B-A3B-GPTQ-Int4": Vendor(
        WeightFormat.INT4,
        _QWEN3 | {"quantization_config": {
            "bits": 4, "checkpoint_format": "gptq", "desc_act": False, "group_size": 128, "lm_head": False,
            "meta": {"quantizer": ["gptqmodel:2.3.0"], "damp_percent": 0.05, "true_sequential": True},
            "pack_dtype": "int32", "quant_method": "gptq", "sym": True,
        }},
        gptq,
    ),
    "AWQ without zero points": Vendor(
        WeightFormat.INT4,
        _QWEN3 | {"quantization_config": {
            "bits": 4, "group_size": 128, "modules_to_not_convert": ["gate"], "quant_method": "awq",
            "version": "gemm", "zero_point": False,
        }},
        awq,
    ),
    "llm-compressor's W4A16": Vendor(
        WeightFormat.INT4,
        _QWEN3 | {"quantization_config": _compressed(
            {"group_size": 128, "num_bits": 4, "strategy": "group", "type": "int"}, "pack-quantized",
            ["lm_head", "re:.*mlp.gate$"],
        )},
        partial(int4, group=128),
    ),
}  # fmt: skip


def _with_input(encoded: tuple[Tensors, Tensor]) -> tuple[Tensors, Tensor]:
    """The scale of activations beside it."""
    return encoded[0] | {".input_global_scale": torch.ones(1)}, encoded[1]


async def served(directory: Path, tokens: Tensor, **changes: Any) -> tuple[Settings, Said, Tensor]:
    """(settings with the layer, its parameters in the metadata, its answer) of a server of the checkpoint.

    changes  of its settings: `backend`, and those of the checkpoint
    """
    backend = changes.pop("backend", "reference")
    entry = {"path": directory, "layers": str(LAYER), "name": "tiny", "datatype": "FP32", **changes}
    given = resolve_checkpoints(tiny_settings(models=[], checkpoints=[entry], backend=backend))
    async with serving(given) as server:
        path = f"/v2/models/tiny.layers.{LAYER}"
        about = (await server.http.get(path)).json()["parameters"]
        body, length = hidden_request(tokens.float().numpy())
        headers = {"Inference-Header-Content-Length": str(length)}
        answer = output_of(await server.http.post(f"{path}/infer", content=body, headers=headers))
    return given, about, torch.from_numpy(np.array(answer))


def new_tokens(generator: torch.Generator) -> Tensor:
    """bf16 [TOKENS, HIDDEN]"""
    return torch.randn(TOKENS, HIDDEN, generator=generator).to(torch.bfloat16)
