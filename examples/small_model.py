"""Makes a small MoE language model of random weights, and saves it as a checkpoint directory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZE_UNIT = 256  # expertd needs multiples of 128, and an expert is half as wide as a hidden state
_HEAD = 64

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"norm_topk_prob": True, "head_dim": _HEAD, "num_key_value_heads": 2},
    "deepseek_v3": {
        "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "n_shared_experts": 1,
        "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": _HEAD, "qk_rope_head_dim": 32,
        "v_head_dim": _HEAD,
    },
}  # fmt: skip
"""Settings by model_type, beside the sizes."""


@dataclass(frozen=True)
class Sizes:
    """`layers` counts the MoE layers; deepseek_v3 has a dense one before them, as its checkpoints do."""

    layers: int = 3
    hidden_size: int = SIZE_UNIT
    num_experts: int = 8
    top_k: int = 3


def make_checkpoint(directory: Path, family: str, sizes: Sizes, dtype: torch.dtype, device: str) -> None:
    """Write config.json and the weights, the same in every run on one device. Tokens are bytes."""
    settings = FAMILIES[family]
    config = AutoConfig.for_model(
        family,
        vocab_size=256, hidden_size=sizes.hidden_size, intermediate_size=sizes.hidden_size * 2,
        moe_intermediate_size=sizes.hidden_size // 2,
        num_hidden_layers=sizes.layers + settings.get("first_k_dense_replace", 0),
        num_experts=sizes.num_experts, n_routed_experts=sizes.num_experts, num_experts_per_tok=sizes.top_k,
        num_attention_heads=sizes.hidden_size // _HEAD, max_position_embeddings=4096,
        pad_token_id=None, bos_token_id=None, eos_token_id=None, **settings,
    )  # fmt: skip
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        generator = torch.Generator(device).manual_seed(0)
        for weight in model.parameters():
            if weight.ndim >= 2:  # variance 1 / columns, so that every layer changes the text
                weight.data.normal_(0, weight.shape[-1] ** -0.5, generator=generator)
    model.save_pretrained(directory)
