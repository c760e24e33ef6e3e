"""The rule by which a router chooses experts and their weights."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Routing:
    """A router's rule.

    scoring_func           "softmax" over all experts (Mixtral, Qwen3-MoE), "sigmoid" of each (DeepSeek-V3,
                           Kimi-K2, GLM-4.5, MiniMax-M2), "sqrtsoftplus", the root of the softplus of each
                           (DeepSeek-V4), or "sparsemixer", for each choice the softmax over those of the
                           other experts' logits that are within 2% of the largest (Phi-3.5-MoE)
    renormalize            a token's weights are divided by their sum
    routed_scaling_factor  then multiplied by this
    num_expert_groups      number of equal groups that the experts form
    topk_group             a token's experts come from its best topk_group groups
    group_score            the sum of a group's two best scores, or its best one (DeepSeek-V2)
    bias_on                what a router's bias is added to: the scores that choose experts, never the weights
                           ("choice"), or the logits (gpt-oss)

    Source: the routers of transformers 5.23 (deepseek_v3, glm4_moe, minimax_m2, mixtral, qwen3_moe,
    deepseek_v2, deepseek_v4, gpt_oss, phimoe). Raises ValueError (name, expected, got) for an unknown
    scoring_func, group_score or bias_on, or a topk_group that is not between 1 and num_expert_groups.
    """

    scoring_func: Literal["softmax", "sigmoid", "sqrtsoftplus", "sparsemixer"] = "softmax"
    renormalize: bool = True
    routed_scaling_factor: float = 1.0
    num_expert_groups: int = 1
    topk_group: int = 1
    group_score: Literal["best_two", "best"] = "best_two"
    bias_on: Literal["choice", "logits"] = "choice"

    def __post_init__(self) -> None:
        if self.scoring_func not in ("softmax", "sigmoid", "sqrtsoftplus", "sparsemixer"):
            expected = "'softmax', 'sigmoid', 'sqrtsoftplus' or 'sparsemixer'"
            raise ValueError(f"scoring_func: expected {expected}, got {self.scoring_func!r}")
        if self.group_score not in ("best_two", "best"):
            raise ValueError(f"group_score: expected 'best_two' or 'best', got {self.group_score!r}")
        if self.bias_on not in ("choice", "logits"):
            raise ValueError(f"bias_on: expected 'choice' or 'logits', got {self.bias_on!r}")
        if not 1 <= self.topk_group <= self.num_expert_groups:
            expected = f"1 to num_expert_groups ({self.num_expert_groups})"
            raise ValueError(f"topk_group: expected {expected}, got {self.topk_group}")

    @property
    def in_kernels(self) -> bool:
        """Whether the backends' own kernels follow the rule; PyTorch follows every one."""
        return self.scoring_func in ("softmax", "sigmoid") and self.group_score == "best_two"

    def check(self, num_experts: int, top_k: int) -> None:
        """Raise ValueError unless the experts form equal groups, topk_group of which hold top_k experts."""
        if num_experts % self.num_expert_groups != 0:
            expected = f"a multiple of num_expert_groups ({self.num_expert_groups})"
            raise ValueError(f"num_experts: expected {expected}, got {num_experts}")
        eligible = num_experts // self.num_expert_groups * self.topk_group
        if top_k > eligible:
            raise ValueError(f"top_k: expected at most the {eligible} experts of topk_group, got {top_k}")
