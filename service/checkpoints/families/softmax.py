"""The families that score experts by softmax. Sources as in sigmoid.py."""

from dataclasses import replace

from expertd.limits import HIDDEN_STEP
from expertd.service.checkpoints.families.activations import swigluoai
from expertd.service.checkpoints.families.family import W1_W3_W2, Family, Router, Shared, names
from expertd.service.checkpoints.families.layers import (
    between,
    by_period,
    every_layer,
    from_layer,
    sparse_step,
)

_BY_CONFIG, _ALWAYS = Router("softmax", renormalize=False), Router("softmax", always=True)

_QWEN3 = Family(models="Qwen3-MoE", router=_BY_CONFIG, names=names("mlp"), layers=sparse_step)
_QWEN2 = replace(
    _QWEN3,
    models="Qwen1.5-MoE, Qwen2-MoE",
    names=names("mlp", shared="shared_expert", shared_gate="shared_expert_gate.weight"),
    shared=Shared(size_key="shared_expert_intermediate_size"),
)
_OLMOE = Family(models="OLMoE", router=_BY_CONFIG, names=names("mlp"), intermediate="intermediate_size")

_MISTRAL4 = Family(
    models="Mistral 4",
    router=Router("softmax", scale=1.0, groups=(1, 1)),
    names=names("mlp", shared="shared_experts"),
    shared=Shared(),
    layers=from_layer(0),
)

SOFTMAX = {
    "mixtral": Family(
        models="Mixtral",
        router=_ALWAYS,  # softmax over the chosen experts
        names=names("block_sparse_moe", W1_W3_W2),
        intermediate="intermediate_size",
    ),
    "qwen3_moe": _QWEN3,
    "qwen3_vl_moe": replace(_QWEN3, models="Qwen3-VL MoE", router=_ALWAYS, inside=("text_config",)),
    "qwen3_omni_moe": replace(
        _QWEN3,
        models="Qwen3-Omni (the thinker)",
        router=Router("softmax"),
        inside=("thinker_config", "text_config"),
    ),
    "qwen2_moe": _QWEN2,
    "qwen3_next": replace(
        _QWEN2,
        models="Qwen3-Next",
        router=Router("softmax"),
    ),
    "qwen3_5_moe": replace(
        _QWEN2,
        models="Qwen3.5 MoE, Qwen3.6 MoE",
        router=_ALWAYS,
        layers=every_layer,
        inside=("text_config",),
    ),
    "olmoe": _OLMOE,
    "flex_olmo": replace(_OLMOE, models="FlexOlmo"),
    "deepseek_v2": Family(
        models="DeepSeek-V2, V2-Lite, V2.5",
        router=Router("softmax", renormalize=False, always=True, scale=1.0),
        names=names("mlp", shared="shared_experts"),
        shared=Shared(2),
        layers=from_layer(0),
        expects={"norm_topk_prob": False, "mlp_bias": False},
        nulls={"n_group": 1, "topk_group": 1, "norm_topk_prob": False},
        methods=("greedy", "group_limited_greedy"),
    ),
    "mistral4": _MISTRAL4,
    "mistral3": replace(_MISTRAL4, models="Mistral Small 4", inside=("text_config",)),
    "hunyuan_v1_moe": Family(
        models="Hunyuan-A13B",
        router=_ALWAYS,
        names=names("mlp", router="gate.wg.weight", shared="shared_mlp"),
        shared=Shared(1, fixed=True),
        intermediate="intermediate_size",
        expects={"num_shared_expert": 1},
    ),
    "ernie4_5_moe": Family(
        models="ERNIE 4.5",
        router=_ALWAYS,
        names=names("mlp", bias="moe_statics.e_score_correction_bias", shared="shared_experts"),
        shared=Shared(2),
        layers=between,
        expects={"use_bias": False},
    ),
    "jamba": Family(
        models="Jamba",
        router=Router("softmax", renormalize=False, always=True),
        names=names("feed_forward", router="router.weight"),
        layers=by_period,
        intermediate="intermediate_size",
    ),
    "gpt_oss": Family(
        models="gpt-oss-20b, gpt-oss-120b",
        router=Router("softmax", always=True, bias_on="logits"),
        names=names(
            "mlp",
            router="router.weight",
            bias="router.bias",
            interleaved=True,
            expert_biases=("experts.gate_up_proj_bias", "experts.down_proj_bias"),
        ),
        activation=swigluoai,
        intermediate="intermediate_size",
        step=HIDDEN_STEP,
    ),
    "phimoe": Family(
        models="Phi-3.5-MoE",
        router=Router("sparsemixer", renormalize=False, always=True),
        names=names("block_sparse_moe", W1_W3_W2),
        intermediate="intermediate_size",
        expects={"router_jitter_noise": 0.01, "num_experts_per_tok": 2},
    ),
    "granitemoe": Family(
        models="Granite 3 MoE",
        router=_ALWAYS,
        names=names(
            "block_sparse_moe",
            router="router.layer.weight",
            stacked=("input_linear.weight", "output_linear.weight"),
        ),
        intermediate="intermediate_size",
    ),
}
