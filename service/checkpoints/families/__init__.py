"""The supported families of models, one module each, named as in transformers.

A new family needs a module with `read`, and a line here.
"""

from expertd.service.checkpoints.families import deepseek_v3, glm4_moe, minimax_m2, mixtral, qwen3_moe
from expertd.service.checkpoints.model import Family

FAMILIES: dict[str, Family] = {
    "deepseek_v3": deepseek_v3.read,
    "glm4_moe": glm4_moe.read,
    "kimi_k2": deepseek_v3.read,
    "minimax_m2": minimax_m2.read,
    "mixtral": mixtral.read,
    "qwen3_moe": qwen3_moe.read,
}
"""Readers by the model_type of config.json; Kimi-K2 is DeepSeek-V3 with other sizes."""
