"""The model families that tests build: small, from transformers' classes.

This is the only table of them; routing rules, checkpoints and their readers are all tested with it.
"""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, NamedTuple

from expertd.kernels import Routing

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, LAYERS = 256, 128, 8, 3, 3

_WIDTHS = (INTERMEDIATE, 2 * INTERMEDIATE)  # of an expert, or of a shared one
_SIZES = {
    "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_experts_per_tok": TOP_K, "vocab_size": 64,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": INTERMEDIATE, "intermediate_size": 384}
_DEEPSEEK = _EXPERTS | {
    "n_routed_experts": EXPERTS, "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 16, "qk_nope_head_dim": 16,
}  # fmt: skip


class Sizes(NamedTuple):
    """Other sizes than the common ones."""

    hidden: int = HIDDEN
    intermediate: int = INTERMEDIATE
    experts: int = EXPERTS
    top_k: int = TOP_K


@dataclass(frozen=True)
class FamilyCase:
    """A family, or a variation of one.

    model_type  the key in config.json by which the service recognizes the family
    prefix      the prefix of its classes in transformers
    settings    configuration values beside `_SIZES`; `...` leaves one of them out
    routing     the routing rule that follows from them
    class_name  transformers' class of the model; None: the prefix and ForCausalLM
    config_name  and of its configuration; None: the prefix and Config
    scaled_after what transformers multiplies the experts' sum by, where that is not in the routing weights
    top_k        of every model of the family; None: any
    renames      patterns in its names of tensors that the models' own checkpoints have otherwise, and how
    """

    model_type: str
    prefix: str
    settings: dict[str, Any]
    routing: Routing
    class_name: str | None = None
    config_name: str | None = None
    scaled_after: float = 1.0
    renames: tuple[tuple[str, str], ...] = ()
    top_k: int | None = None

    def config(self, **changes: Any) -> Any:
        """transformers' configuration, with these values changed."""
        config_class = self._class(self.config_name or f"{self.prefix}Config")
        values = _SIZES | self.settings | changes
        return config_class(**{name: value for name, value in values.items() if value is not ...})

    def sized(self, sizes: Sizes) -> "FamilyCase":
        """The same with these sizes, whatever its settings call them."""
        changed: dict[str, Any] = {
            "hidden_size": sizes.hidden,
            "num_experts_per_tok": self.top_k or sizes.top_k,
        }
        for name, value in self.settings.items():
            if name in ("moe_topk", "moe_k"):
                changed[name] = sizes.top_k
            elif "expert" in name and value == EXPERTS:
                changed[name] = sizes.experts
            elif re.search("intermediate|expert_dim|expert_intermediate", name) and value in _WIDTHS:
                changed[name] = value // INTERMEDIATE * sizes.intermediate
        return replace(self, settings=self.settings | changed)

    @property
    def model_class(self) -> Any:
        """transformers' class of the model."""
        return self._class(self.class_name or f"{self.prefix}ForCausalLM")

    @staticmethod
    def _class(name: str) -> Any:
        return getattr(import_module("transformers"), name)

    def with_settings(self, routing: Routing, **settings: Any) -> "FamilyCase":
        """The same family with other settings, and the rule that follows from them."""
        return replace(self, settings=self.settings | settings, routing=routing)


_DEEPSEEK_V3 = FamilyCase(
    "deepseek_v3", "DeepseekV3",
    _DEEPSEEK | {"n_group": 4, "topk_group": 2, "n_shared_experts": 1},
    Routing("sigmoid", True, 2.5, 4, 2),
)  # fmt: skip
_QWEN3 = FamilyCase(
    "qwen3_moe", "Qwen3Moe",
    {"moe_intermediate_size": INTERMEDIATE, "num_experts": EXPERTS, "norm_topk_prob": True},
    Routing("softmax"),
)  # fmt: skip

FAMILIES = {
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-v3-plain": _DEEPSEEK_V3.with_settings(  # weights that are not normalized, every group chosen
        Routing("sigmoid", False, 2.5, 2, 2), n_group=2, topk_group=2, norm_topk_prob=False
    ),
    "kimi-k2": replace(
        _DEEPSEEK_V3.with_settings(
            Routing("sigmoid", True, 2.827),
            n_group=1, topk_group=1, routed_scaling_factor=2.827, n_shared_experts=2,
        ),
        model_type="kimi_k2",
    ),
    "glm-4.5": FamilyCase(
        "glm4_moe", "Glm4Moe",
        {"moe_intermediate_size": INTERMEDIATE, "n_routed_experts": EXPERTS, "first_k_dense_replace": 1,
         "routed_scaling_factor": 2.5, "n_shared_experts": 1, "head_dim": 32},
        Routing("sigmoid", True, 2.5),
    ),
    "minimax-m2": FamilyCase(
        "minimax_m2", "MiniMaxM2",
        {"intermediate_size": INTERMEDIATE, "num_local_experts": EXPERTS, "head_dim": 32},
        Routing("sigmoid"),
    ),
    "mixtral": FamilyCase(
        "mixtral", "Mixtral",
        {"intermediate_size": INTERMEDIATE, "num_local_experts": EXPERTS},
        Routing("softmax"),
    ),
    "qwen3": _QWEN3,
    "qwen3-dense": _QWEN3.with_settings(  # weights that are not normalized, and a dense layer
        Routing("softmax", False), norm_topk_prob=False, mlp_only_layers=[0]
    ),
}  # fmt: skip


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence its warnings about optional packages that are not installed, which would fail a test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
