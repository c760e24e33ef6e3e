"""Small checkpoints with random weights: `python checkpoints.py DIRECTORY [FAMILY] [--fp8]` makes one."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 320
_SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": VOCABULARY,
    "max_position_embeddings": 512, "initializer_range": 0.1, "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "norm_topk_prob": True},
    "qwen2_moe": {"num_experts": 8, "shared_expert_intermediate_size": 128},
    "deepseek_v3": {  # vLLM's latent attention has these sizes alone
        "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "v_head_dim": 32, "qk_nope_head_dim": 32, "head_dim": 64, "n_routed_experts": 8,
        "n_shared_experts": 2, "first_k_dense_replace": 1, "topk_method": "noaux_tc", "n_group": 2,
        "topk_group": 1, "routed_scaling_factor": 2.5,
    },
    "gpt_oss": {"num_local_experts": 8, "intermediate_size": 128, "sliding_window": 64},
    "granitemoe": {"num_local_experts": 8, "intermediate_size": 128},
}  # fmt: skip
_LARGE: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 1024, "moe_intermediate_size": 768, "num_hidden_layers": 4,
    "num_attention_heads": 8, "head_dim": 64, "num_experts_per_tok": 4,
}  # fmt: skip
GPU_SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": _LARGE | {"num_experts": 16},
    "deepseek_v3": _LARGE | {
        "n_routed_experts": 16, "num_key_value_heads": 8, "q_lora_rank": 256, "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
}  # fmt: skip
"""Of checkpoints in FP8, which kernels of GPUs take."""
_BLOCK, _LARGEST = 128, 448.0
_CHAT = "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"


def make_checkpoint(directory: Path, family: str = "qwen3_moe", seed: int = 0, **sizes: int) -> None:
    """Write `directory`: a model in bfloat16, whose experts lose nothing when they are rounded to FP8."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **(_SIZES | FAMILIES[family] | sizes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name or "_linear.weight" in name:
                parameter.copy_(
                    _exact(parameter) if parameter.ndim == 3 else torch.randn_like(parameter) * 0.1
                )
    model.save_pretrained(directory)
    _make_tokenizer().save_pretrained(directory)
    if family == "deepseek_v3":
        _add_next_token_layer(directory, config.num_hidden_layers, config.hidden_size)


def write_fp8(directory: Path, exact: Path | None = None) -> None:
    """Round the projections in `directory` to FP8 in blocks; `exact` gets the same numbers in bfloat16."""
    if exact is not None:
        exact.mkdir()
        for path in directory.iterdir():
            if path.suffix != ".safetensors":
                (exact / path.name).write_bytes(path.read_bytes())
    (file,) = directory.glob("*.safetensors")
    tensors, rounded = load_file(file), {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            rounded[name] = tensor
            continue
        rounded[name], scales = _round(tensor.float())
        rounded[f"{name}_scale_inv"] = scales
        rows, columns = tensor.shape
        wide = scales.repeat_interleave(_BLOCK, 0)[:rows].repeat_interleave(_BLOCK, 1)[:, :columns]
        tensors[name] = (rounded[name].float() * wide).bfloat16()
    if exact is not None:
        save_file(tensors, exact / file.name, {"format": "pt"})
    save_file(rounded, file, {"format": "pt"})
    config = directory / "config.json"
    quantization = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [_BLOCK, _BLOCK],
    }  # fmt: skip
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": quantization}))


def _round(weights: Tensor) -> tuple[Tensor, Tensor]:
    """To FP8, with a power of two for each block, so that products are bfloat16."""
    rows, columns = weights.shape
    padded = torch.nn.functional.pad(weights, (0, -columns % _BLOCK, 0, -rows % _BLOCK))
    blocks = padded.unfold(0, _BLOCK, _BLOCK).unfold(1, _BLOCK, _BLOCK)
    scales = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax((2, 3)).clamp(min=1e-10) / _LARGEST)))
    wide = scales.repeat_interleave(_BLOCK, 0)[:rows].repeat_interleave(_BLOCK, 1)[:, :columns]
    return (weights / wide).to(torch.float8_e4m3fn), scales


def _add_next_token_layer(directory: Path, number: int, size: int) -> None:
    """A layer for multi-token prediction, which transformers does not write: the last layer's once more."""
    (file,) = directory.glob("*.safetensors")
    tensors = load_file(file)
    last, name = f"model.layers.{number - 1}.", f"model.layers.{number}."
    added = {key.replace(last, name): value.clone() for key, value in tensors.items() if key.startswith(last)}
    added |= {
        f"{name}{norm}.weight": tensors["model.norm.weight"].clone()
        for norm in ("enorm", "hnorm", "shared_head.norm")
    }
    added[f"{name}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    added[f"{name}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    added[f"{name}eh_proj.weight"] = torch.randn(size, 2 * size, dtype=torch.bfloat16) * 0.1
    save_file(tensors | added, file, {"format": "pt"})
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": 1}))


def _exact(like: Tensor) -> Tensor:
    """Random numbers that are FP8 times a power of 2, and in each block one of the largest that FP8 has."""
    numbers = (torch.randn(like.shape) * 100).clamp(-448, 448)
    numbers[..., ::64, ::64] = 448
    numbers[..., 1::64, ::64] = 448  # where gate and up are interleaved, by rows or
    numbers[..., ::64, 1::64] = 448  # by columns
    return numbers.to(torch.float8_e4m3fn).to(like.dtype) * 2.0**-11


def _make_tokenizer() -> Any:
    words = {f"w{number}": number for number in range(VOCABULARY - 2)} | {
        "user": VOCABULARY - 2,
        "<end>": VOCABULARY - 1,
    }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", chat_template=_CHAT)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("family", nargs="?", default="qwen3_moe", choices=FAMILIES)
    parser.add_argument("--fp8", action="store_true", help="larger, in FP8, for a GPU")
    given = parser.parse_args()
    make_checkpoint(given.directory, given.family, **(GPU_SIZES[given.family] if given.fp8 else {}))
    if given.fp8:
        write_fp8(given.directory)
