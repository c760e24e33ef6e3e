"""GLM-4.5 and GLM-4.5-Air: DeepSeek-V3's block with other defaults. Source: transformers 5.23, glm4_moe."""

from expertd.service.checkpoints.config import Config
from expertd.service.checkpoints.families import deepseek_v3
from expertd.service.checkpoints.model import MoEModel


def read(config: Config) -> MoEModel:
    return deepseek_v3.read(
        config, first_k_dense_replace=1, routed_scaling_factor=1.0, n_group=1, topk_group=1
    )
