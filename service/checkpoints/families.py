"""The table of model families: a row for each model_type of config.json, and those that are refused.

The loader, the tests and docs/checkpoints.md all read it. Sources: transformers 5.23, the class of each model
type, and its table of the checkpoints' names.
"""

from dataclasses import replace

from expertd.limits import HIDDEN_STEP
from expertd.service.checkpoints.family import (
    GATE_UP_DOWN,
    W1_W3_W2,
    Family,
    Router,
    SharedExpert,
    between,
    by_period,
    clamped,
    clamped_by_layer,
    every_layer,
    from_layer,
    interleaved,
    names,
    routed_clamped,
    sparse_step,
    swigluoai,
)

_BIAS = "gate.e_score_correction_bias"
_NO_SHARED = {"n_shared_experts": 0, "norm_topk_prob": False}

_DEEPSEEK_V3 = Family(
    models="DeepSeek-V3, V3.1, R1",
    router=Router("sigmoid", scale=2.5, groups=(8, 4)),
    names=names("mlp", bias=_BIAS, shared="shared_experts"),
    shared=SharedExpert(),
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
    shared=SharedExpert(size_key="shared_intermediate_size"),
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
    shared=SharedExpert(size_key="share_expert_dim"),
    activation=clamped_by_layer,
    layers=from_layer(3),
    expects={"use_moe_router_bias": True, "mlp_bias": False},
    inside=("text_config",),
)
_BY_CONFIG, _ALWAYS = Router("softmax", renormalize=False), Router("softmax", always=True)

_QWEN3 = Family(models="Qwen3-MoE", router=_BY_CONFIG, names=names("mlp"), layers=sparse_step)
_QWEN2 = replace(
    _QWEN3,
    models="Qwen1.5-MoE, Qwen2-MoE",
    names=names("mlp", shared="shared_expert", shared_gate="shared_expert_gate.weight"),
    shared=SharedExpert(size_key="shared_expert_intermediate_size"),
)
_OLMOE = Family(models="OLMoE", router=_BY_CONFIG, names=names("mlp"), intermediate="intermediate_size")

_MISTRAL4 = Family(
    models="Mistral 4",
    router=Router("softmax", scale=1.0, groups=(1, 1)),
    names=names("mlp", shared="shared_experts"),
    shared=SharedExpert(),
    layers=from_layer(0),
)

_ROWS = {
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
        shared=SharedExpert(None),
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
        shared=SharedExpert(),
        layers=from_layer(1),
    ),
    "laguna": Family(
        models="Laguna",
        router=Router("sigmoid", always=True, scale=1.0),
        names=names("mlp", bias="experts.e_score_correction_bias", shared="shared_expert"),
        shared=SharedExpert(size_key="shared_expert_intermediate_size"),
        layers=from_layer(1),
        expects={"moe_router_logit_softcapping": 0, "moe_apply_router_weight_on_input": False},
    ),
    "afmoe": Family(
        models="Trinity",
        router=Router("sigmoid", always=True, scale=1.0),
        names=names("mlp", router="router.gate.weight", bias="expert_bias", shared="shared_experts"),
        shared=SharedExpert(2),
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
        shared=SharedExpert(),
        activation=clamped,
        refused=("num_hash_layers", 3, "experts are chosen by the token's id, which requests do not carry"),
        expects={"mlp_bias": False},
        methods=("noaux_tc",),
    ),
    "llama4": Family(
        models="Llama 4",
        router=Router("sigmoid", renormalize=False, always=True),
        names=names("feed_forward", router="router.weight", shared="shared_expert"),
        shared=SharedExpert(1, fixed=True),
        layers=interleaved,
        intermediate="intermediate_size",
        inside=("text_config",),
        weighs_input=True,
    ),
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
        shared=SharedExpert(2),
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
        shared=SharedExpert(1, fixed=True),
        intermediate="intermediate_size",
        expects={"num_shared_expert": 1},
    ),
    "ernie4_5_moe": Family(
        models="ERNIE 4.5",
        router=_ALWAYS,
        names=names("mlp", bias="moe_statics.e_score_correction_bias", shared="shared_experts"),
        shared=SharedExpert(2),
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
FAMILIES: dict[str, Family] = dict(sorted(_ROWS.items()))
"""Rows by model_type."""

REFUSED: dict[str, str] = {
    "gemma4": "experts use gelu, and the router has scales of its own for its input and for each expert",
    "nemotron_h": "experts use relu2 without a gate, some of them in a latent space",
    "longcat_flash": "some experts are identities without weights",
    "kimi_k3": "experts work in a latent space",
    "deepseek_ref": "its config.json leaves out the scaling factor of the routing weights",
    "dbrx": "experts of all layers are stacked in one matrix",
}
"""Model types that are known and not served, with the reason."""
