"""The families that score experts by sigmoid: DeepSeek-V3 and those after it.

Sources: transformers 5.23, the class of each model type, and its table of the checkpoints' names.
"""

from dataclasses import replace

from expertd.service.checkpoints.families.activations import (
    clamped,
    clamped_by_layer,
    routed_clamped,
    swigluoai,
)
from expertd.service.checkpoints.families.family import GATE_UP_DOWN, W1_W3_W2, Family, Router, Shared, names
from expertd.service.checkpoints.families.layers import from_layer, interleaved

_BIAS = "gate.e_score_correction_bias"
_NO_SHARED = {"n_shared_experts": 0, "norm_topk_prob": False}

_DEEPSEEK_V3 = Family(
    models="DeepSeek-V3, V3.1, R1",
    router=Router("sigmoid", scale=2.5, groups=(8, 4)),
    names=names("mlp", bias=_BIAS, shared="shared_experts"),
    shared=Shared(),
    layers=from_layer(3),
    next_token=True,
    methods=("noaux_tc",),
    nulls=_NO_SHARED,
)
_GLM4 = replace(
    _DEEPSEEK_V3,
    models="GLM-4.5, 4.5-Air, 4.6, 4.7",
    router=Router("sigmoid", scale=1.0, groups=(1, 1)),
    layers=from_layer(1),
)

_MINIMAX_M3 = Family(
    models="MiniMax-M3",
    router=Router("sigmoid", always=True, scale=2.0),
    names=names(
        "block_sparse_moe",
        W1_W3_W2,
        bias="e_score_correction_bias",
        shared="shared_experts",
        shared_projections=GATE_UP_DOWN,
    ),
    shared=Shared(size_key="shared_intermediate_size"),
    activation=swigluoai,
    layers=from_layer(3),
    intermediate="intermediate_size",
    expects={"use_routing_bias": True},
    inside=("text_config",),
)

_STEP3 = Family(
    models="Step-3.7-Flash",
    router=Router("sigmoid", always=True, scale=1.0),
    names=names(
        "moe",
        bias="router_bias",
        shared=".share_expert",
        stacked=("gate_proj.weight", "up_proj.weight", "down_proj.weight"),
    ),
    shared=Shared(size_key="share_expert_dim"),
    activation=clamped_by_layer,
    layers=from_layer(3),
    expects={"use_moe_router_bias": True, "mlp_bias": False},
    inside=("text_config",),
)

SIGMOID = {
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": replace(_DEEPSEEK_V3, models="DeepSeek-V3.2"),
    "kimi_k2": replace(_DEEPSEEK_V3, models="Kimi-K2"),
    "kimi_k25": replace(_DEEPSEEK_V3, models="Kimi-K2.5, K2.6, K2.7", inside=("text_config",)),
    "glm4_moe": _GLM4,
    "glm4v_moe": replace(_GLM4, models="GLM-4.5V, 4.6V", inside=("text_config",), next_token=False),
    "glm4_moe_lite": replace(
        _GLM4, models="GLM-4.7-Flash", router=Router("sigmoid", scale=1.8, groups=(1, 1))
    ),
    "glm_moe_dsa": replace(
        _GLM4,
        models="GLM-5, 5.1, 5.2",
        router=Router("sigmoid", scale=2.5, groups=(1, 1)),
        layers=from_layer(3),
    ),
    "dots1": replace(
        _GLM4,
        models="dots.llm1",
        router=Router("sigmoid", renormalize=False, scale=1.0, groups=(1, 1)),
        shared=Shared(None),
        layers=from_layer(0),
        next_token=False,
    ),
    "solar_open": replace(_GLM4, models="Solar Open", layers=from_layer(0), next_token=False),
    "exaone_moe": replace(
        _GLM4,
        models="K-EXAONE",
        router=Router("sigmoid", scale=2.5, groups=(1, 1)),
        names=names("mlp", bias="e_score_correction_bias", shared="shared_experts"),
        next_token=False,
    ),
    "bailing_hybrid": replace(
        _GLM4,
        models="Ling-2.5, Ring-2.5",
        router=Router("sigmoid", scale=2.5, groups=(8, 4)),
        names=names("mlp", bias="gate.expert_bias", shared="shared_experts"),
        layers=from_layer(2),
        next_token=False,
    ),
    "kimi_linear": replace(
        _GLM4,
        models="Kimi-Linear",
        router=Router("sigmoid", scale=2.446, groups=(1, 1)),
        names=names(
            "block_sparse_moe",
            W1_W3_W2,
            bias=_BIAS,
            shared="shared_experts",
            shared_projections=GATE_UP_DOWN,
        ),
        next_token=False,
    ),
    "mimo_v2_flash": replace(
        _GLM4,
        models="MiMo-V2-Flash",
        names=names("mlp", bias=_BIAS),
        shared=None,
        next_token=False,
        nulls=_NO_SHARED | {"routed_scaling_factor": 1.0},
    ),
    "minimax_m2": Family(
        models="MiniMax-M2, M2.1, M2.5, M2.7",
        router=Router("sigmoid", always=True),
        names=names("block_sparse_moe", W1_W3_W2, bias="e_score_correction_bias"),
        intermediate="intermediate_size",
        expects={"use_routing_bias": True, "shared_intermediate_size": 0},
    ),
    "hy_v3": Family(
        models="Hunyuan 3",
        router=Router("sigmoid", always=True, scale=2.826),
        names=names("mlp", router="router.gate.weight", bias="expert_bias", shared="shared_mlp"),
        shared=Shared(),
        layers=from_layer(1),
    ),
    "laguna": Family(
        models="Laguna",
        router=Router("sigmoid", always=True, scale=1.0),
        names=names("mlp", bias="experts.e_score_correction_bias", shared="shared_expert"),
        shared=Shared(size_key="shared_expert_intermediate_size"),
        layers=from_layer(1),
        expects={"moe_router_logit_softcapping": 0, "moe_apply_router_weight_on_input": False},
    ),
    "afmoe": Family(
        models="Trinity",
        router=Router("sigmoid", always=True, scale=1.0),
        names=names("mlp", router="router.gate.weight", bias="expert_bias", shared="shared_experts"),
        shared=Shared(2),
        layers=from_layer(1, key="num_dense_layers"),
        expects={"n_group": 1, "topk_group": 1, "route_norm": True},
    ),
    "lfm2_moe": Family(
        models="LFM2 MoE",
        router=Router("sigmoid", scale=1.0),
        names=names("feed_forward", W1_W3_W2, bias="expert_bias"),
        layers=from_layer(2, key="num_dense_layers"),
        bias_key="use_expert_bias",
    ),
    "glm5_next": replace(
        _GLM4,
        models="GLM-5-Next",
        router=Router("sigmoid", scale=2.5, groups=(1, 1)),
        activation=clamped,
        layers=from_layer(3),
        next_token=False,
        inside=("text_config",),
    ),
    "hy_v4": replace(
        _GLM4,
        models="Hunyuan 4",
        router=Router("sigmoid", scale=2.827, groups=(1, 1)),
        activation=routed_clamped,
        next_token=False,
    ),
    "step3p5": replace(_STEP3, models="Step-3.5-Flash", inside=()),
    "step3p7": _STEP3,
    "minimax_m3": _MINIMAX_M3,
    "minimax_m3_vl": replace(_MINIMAX_M3, models="MiniMax-M3 with vision"),
    "deepseek_v4": Family(
        models="DeepSeek-V4",
        router=Router("sqrtsoftplus", always=True, scale=1.5),
        names=names("ffn", W1_W3_W2, bias="gate.bias", shared="shared_experts"),
        shared=Shared(),
        activation=clamped,
        refused=("num_hash_layers", 3, "experts are chosen by the token's id, which requests do not carry"),
        expects={"mlp_bias": False},
        methods=("noaux_tc",),
    ),
    "llama4": Family(
        models="Llama 4",
        router=Router("sigmoid", renormalize=False, always=True),
        names=names("feed_forward", router="router.weight", shared="shared_expert"),
        shared=Shared(1, fixed=True),
        layers=interleaved,
        intermediate="intermediate_size",
        inside=("text_config",),
        weighs_input=True,
    ),
}
