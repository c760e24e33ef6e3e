"""What is said of how weights are quantized, in the forms of exporters, beside what their tensors are."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from expertd.service.checkpoints import CheckpointError
from expertd.service.checkpoints.model import PREFIXES
from expertd.weight_format import WeightFormat
from tests.service.checkpoints.builders import edit_json
from tests.service.checkpoints.encoders import ENCODERS, Encoder, awq, bf16, gptq, int4
from tests.service.checkpoints.layouts import LAYOUTS, write
from tests.service.checkpoints.test_stacks import check, check_four_bits, is_native, load

Said = dict[str, Any]
BLOCK = "model.layers.0.block_sparse_moe"
EXPERT = f"{BLOCK}.experts.0.w1"
ATTENTION = "model.layers.0.self_attn.q_proj"


def group(num_bits: int, kind: str, targets: list[str] | None = None, **settings: Any) -> Said:
    weights = {"num_bits": num_bits, "type": kind, "symmetric": True, "dynamic": False, **settings}
    return {"targets": targets or ["Linear"], "weights": weights, "input_activations": None}


def compressed(*groups: Said, **settings: Any) -> Said:
    """compressed-tensors'."""
    return {
        "quant_method": "compressed-tensors", "format": "mixed-precision", "kv_cache_scheme": None,
        "config_groups": {f"group_{index}": each for index, each in enumerate(groups)}, **settings,
    }  # fmt: skip


def modelopt(algorithm: str | None, **settings: Any) -> Said:
    return {"quant_method": "modelopt", "quant_algo": algorithm, **settings}


def mixed(**layers: str) -> Said:
    names = {"attention": ATTENTION, "experts": f"{BLOCK}.experts", "expert": EXPERT}
    return modelopt(
        "MIXED_PRECISION",
        quantized_layers={names[name]: {"quant_algo": algorithm} for name, algorithm in layers.items()},
    )


def autofp8(scheme: str, **settings: Any) -> Said:
    return {"quant_method": "fp8", "activation_scheme": scheme, **settings}


BY_BLOCK = group(8, "float", ["re:.*experts.*"], strategy="block", block_structure=[128, 128])
INT8, INT4 = group(8, "int", strategy="channel"), group(4, "int", strategy="group", group_size=128)
ATTENTION_INT8 = group(8, "int", ["re:.*self_attn.*"], strategy="channel")
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
BITS_AND_BYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
QUARK = {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}}
TRANSFORM = {"location": "weight_input", "targets": ["re:.*experts.*"], "ignore": []}


def int8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 127
    data = (weight / scales).round().to(torch.int8)
    return {".weight": data, ".weight_scale": scales}, data * scales


def asymmetric(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    stored, values = int4(weight)
    return stored | {".weight_zero_point": torch.zeros(weight.shape[0] // 8, 1, dtype=torch.int32)}, values


SERVED: list[tuple[str | Encoder, Said | None]] = [
    # What is said of experts that are floats decides nothing, and neither does what is said of other modules.
    *(
        (bf16, said)
        for said in (
            None, {}, GPTQ, AWQ, BITS_AND_BYTES, {"load_in_8bit": True}, {"quant_method": "torchao"},
            compressed(INT8), compressed(INT4, ignore=["re:.*experts.*"]), modelopt("FP8_PB_WO"),
            modelopt("W4A8_AWQ", exclude_modules=[f"{BLOCK}.experts*"]), mixed(attention="FP8_PB_WO"),
            autofp8("static", modules_to_not_convert=["experts"]), QUARK,
        )
    ),
    # AutoFP8's, Quark's and ModelOpt's, with a scale per tensor
    *(
        ("fp8 by tensor", said)
        for said in (
            None, {}, autofp8("static"), autofp8("dynamic"), autofp8("static", ignored_layers=["lm_head"]),
            autofp8("static", weight_block_size=None, kv_cache_scheme="static"), QUARK,
            {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": None},
            modelopt("FP8", config_groups={"group_0": group(8, "float")}, ignore=["lm_head"]),
            modelopt(None, kv_cache_scheme="FP8"), mixed(attention="W4A8_AWQ", expert="FP8"), compressed(),
            compressed(group(8, "float", strategy="tensor")), {"kv_cache_scheme": {"num_bits": 8}},
        )
    ),
    *(
        ("fp8 by block", said)
        for said in (
            compressed(BY_BLOCK), compressed(ATTENTION_INT8, BY_BLOCK), compressed(INT8, BY_BLOCK),
            compressed(BY_BLOCK, INT4), compressed(ATTENTION_INT8), compressed(group(8, "int", [ATTENTION])),
            compressed(group(8, "int", ["Embedding", "LlamaAttention"])),
            compressed(INT8, ignore=["re:.*block_sparse_moe.experts.*", "lm_head"]),
            compressed(INT8, group(8, "float", [f"{BLOCK}.experts.{index}.w{part}" for index in range(4)
                                                for part in (1, 2, 3)])),
            compressed(INT8, group(8, "float", [r"re:^model\.layers\.\d+\..*\.experts\.\d+\.w[123]$"])),
            compressed(group(8, "int", ["re:.*w[123]"]), BY_BLOCK),
            compressed(INT8, ignore=["re:^model\\.layers.*experts.*"]),
            compressed(INT8, ignore="re:.*experts.*"), compressed(INT8, llm_int8_skip_modules="experts"),
            compressed(group(8, "float"), transform_config={"config_groups": {"R1": {"apply": [TRANSFORM]}}}),
            autofp8("dynamic", weight_block_size=[128, 128]), autofp8("static", weight_block_size=[128, 128]),
            autofp8("dynamic", weight_block_size=[128, 128], modules_to_not_convert=[f"{BLOCK}.gate"]),
            AWQ | {"modules_to_not_convert": ["self_attn.experts", "block_sparse_moe.experts"]},
            AWQ | {"modules_to_not_convert": [r"model\.layers\.\d+\.block_sparse_moe\.experts"]},
            GPTQ | {"dynamic": {r"-:.*\.experts\..*": {}}},
            BITS_AND_BYTES | {"llm_int8_skip_modules": ["lm_head", "experts"]},
            modelopt("FP8_PB_WO"), modelopt("fp8_pb_wo"), mixed(attention="FP8_PB_WO"),
            modelopt("MIXED_PRECISION", quantized_layers={f"{BLOCK}.experts": {"quant_algo": None}}),
            mixed(attention="W4A8_AWQ"), mixed(attention="NVFP4", experts="FP8_PB_WO"),
            modelopt("W4A8_AWQ", exclude_modules=[f"{BLOCK}.experts*", "lm_head"]),
            modelopt("W4A8_AWQ", exclude_modules=["*experts*"]),
            modelopt("W4A8_AWQ", exclude_modules=["model.language_model.layers.0.block_sparse_moe.experts"]),
            QUARK | {"global_quant_config": {"weight": {"dtype": "int4"}},
                     "layer_quant_config": {"*experts*": {"weight": {"dtype": "fp8_e4m3"}}}},
            QUARK | {"global_quant_config": {"weight": {"dtype": "int8"}}, "exclude": ["*.experts.*"]},
        )
    ),
    ("fp8 by row", compressed(group(8, "float", strategy="channel"))),
    ("fp8 by row", {"quant_method": "fbgemm_fp8"}),
    ("fp8 by row", modelopt("FP8_PER_CHANNEL_PER_TOKEN")),
    ("mxfp8", {"quant_method": "mxfp8", "weight_block_size": [1, 32]}),
    ("mxfp4", QUARK | {"global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32}}}),
    ("mxfp4", autofp8("dynamic", weight_block_size=[128, 128], expert_dtype="fp4")),
    ("nvfp4", mixed(attention="FP8", experts="NVFP4")),
    ("nvfp4", modelopt("NVFP4_AWQ")),
    ("int4", compressed(group(8, "float", ["re:.*self_attn.*"]), INT4)),
]  # fmt: skip


@pytest.mark.parametrize(("encoding", "said"), SERVED)
def test_the_tensors_decide(encoding: str | Encoder, said: Said | None, tmp_path: Path) -> None:
    gate_up, down = write(tmp_path, encoding, quantization=said)
    native = encoding is not bf16 and is_native(str(encoding), "a tensor each")
    name = encoding if isinstance(encoding, str) else "floats"
    if not native and name != "floats":
        with pytest.raises(CheckpointError, match=rf"got {ENCODERS[name][1]}; with requantize: allow, it is"):
            load(tmp_path)
    weights = load(tmp_path, "refuse" if native or name == "floats" else "allow")
    check(weights.gate_up, gate_up, name, is_native=native)
    check(weights.down, down, name, is_native=native)


CONFIG = "config.json: quantization_config"
FILE = "model.safetensors: "
NUMBERS = f"{CONFIG}.config_groups.group_0.weights: expected num_bits 8 and type 'float', or num_bits 4, got "
ALGORITHMS = "FP8, FP8_PB_WO, FP8_PB_REAL, FP8_PER_CHANNEL_PER_TOKEN, FP8_BLOCK_SCALES, NVFP4, W4A16_NVFP4, "
ALGORITHMS = f"expected {ALGORITHMS}NVFP4_AWQ or 5 more"
METHODS = "expected fp8, fbgemm_fp8, mxfp4, mxfp8, gptq, awq, compressed-tensors, modelopt or 1 more"
IN_BLOCKS = f"{EXPERT}, whose tensors are FP8, a scale per 128x128"
RUN_TIME = {"config_groups": {"R4": {"apply": [TRANSFORM | {"location": "input"}]}}}
REFUSED: list[tuple[str | Encoder, Said, str]] = [
    (int8, compressed(INT8), f"{NUMBERS}num_bits 8 and type 'int' for {EXPERT}"),
    (
        int8,
        compressed({"targets": ["Linear"], "weights": {"num_bits": 8}}),
        f"{NUMBERS}num_bits 8 for {EXPERT}",
    ),
    (int8, modelopt("W8A16"), f"{CONFIG}.quant_algo: {ALGORITHMS}, got 'W8A16' for {EXPERT}"),
    (
        int8,
        compressed(INT8, ignore=["re:.*experts.*"]),
        f"{FILE}{EXPERT}.weight dtype: expected F8_E4M3 or BF16 or F16 or F32, got I8",
    ),
    (
        int8,
        QUARK | {"global_quant_config": {"weight": {"dtype": "int8"}}},
        f"{CONFIG}.global_quant_config.weight.dtype: expected fp8_e4m3 or fp4, got 'int8' for {EXPERT}",
    ),
    *(
        (encoder, said, f"{CONFIG}.{sentence} for {EXPERT}, whose tensors are int4")
        for encoder, said, sentence in (
            (gptq, GPTQ | {"sym": False}, "sym: expected true, got false"),
            (gptq, GPTQ | {"desc_act": True}, "desc_act: expected false, got true"),
            (gptq, GPTQ | {"bits": 8}, "bits: expected 4, got 8"),
            (
                gptq,
                GPTQ | {"checkpoint_format": "gptq_v2"},
                "checkpoint_format: expected 'gptq', got 'gptq_v2'",
            ),
            (awq, AWQ, "zero_point: expected false, got true"),
            (awq, AWQ | {"zero_point": False, "version": "gemv"}, "version: expected 'gemm', got 'gemv'"),
            (awq, {"quant_method": "auto-round"}, f"quant_method: {METHODS}, got 'auto-round'"),
        )
    ),
    (
        asymmetric,
        compressed(group(4, "int", symmetric=False)),
        f"{CONFIG}.config_groups.group_0.weights.symmetric: expected true, got false for {EXPERT}, whose "
        "tensors are int4",
    ),
    (
        asymmetric,
        compressed(INT4),
        f": {BLOCK}: expected only a router and 4 experts as in mixtral, got "
        + ", ".join(f"{BLOCK}.experts.0.w{part}.weight_zero_point" for part in (1, 2, 3))
        + " and 9 more",
    ),
    (
        "nvfp4",
        mixed(attention="NVFP4", expert="W4A8_AWQ"),
        f"{CONFIG}.quantized_layers.quant_algo: {ALGORITHMS}, got 'W4A8_AWQ' for {EXPERT}, whose tensors "
        "are NVFP4",
    ),
    ("fp8 by block", {"quant_method": "new"}, f"{CONFIG}.quant_method: {METHODS}, got 'new' for {IN_BLOCKS}"),
    (
        "fp8 by block",
        autofp8("dynamic", weight_block_size=[64, 64]),
        f"{CONFIG}.weight_block_size: expected [128, 128], got [64, 64] for {IN_BLOCKS}",
    ),
    (
        "fp8 by block",
        compressed(group(8, "float", block_structure=[64, 64])),
        f"{CONFIG}.config_groups.group_0.weights.block_structure: expected [128, 128], got [64, 64] for "
        f"{IN_BLOCKS}",
    ),
    ("fp8 by block", compressed(INT8), f"{NUMBERS}num_bits 8 and type 'int' for {IN_BLOCKS}"),
    (
        "fp8 by block",
        modelopt("NVFP4"),
        f"{CONFIG}.quant_algo: expected FP8, a scale per 128x128, got 'NVFP4' for {IN_BLOCKS}",
    ),
    (
        "fp8 by block",
        autofp8("dynamic", expert_dtype="fp4"),
        f"{CONFIG}.expert_dtype: expected FP8, a scale per 128x128, got 'fp4' for {IN_BLOCKS}",
    ),
    (
        "int4",
        compressed(group(8, "float")),
        f"{CONFIG}.config_groups.group_0.weights: expected int4, got num_bits 8 and type 'float' for "
        f"{EXPERT}, whose tensors are int4",
    ),
    (
        bf16,
        compressed(INT8, transform_config=RUN_TIME),
        f"{CONFIG}.transform_config.config_groups.R4.apply.location: expected weight_input or "
        f"weight_output, got 'input' for {EXPERT}, whose tensors are bf16",
    ),
    (
        "int4",
        compressed(INT4, transform_config={"R1": {}}),
        f"{CONFIG}.transform_config: expected config_groups, got an object for {EXPERT}, whose tensors are "
        "int4",
    ),
    (bf16, compressed(group(8, "int", ["re:(("])), f"{CONFIG}: expected patterns of names, got '(('"),
    *(
        (
            "fp8 by block",
            compressed(INT8, ignore=[f"re:{slow}"]),
            f"{CONFIG}: expected patterns of names, got {slow!r}",
        )
        for slow in ("(a+)+!", "(a*b*)*c", "(a{2,})+x")
    ),
]


@pytest.mark.parametrize(("encoding", "said", "sentence"), REFUSED)
def test_the_reason_is_named(encoding: str | Encoder, said: Said, sentence: str, tmp_path: Path) -> None:
    """With values that the files have, and without a hint that would not help."""
    write(tmp_path, encoding, quantization=said)
    for requantize in ("refuse", "allow"):
        with pytest.raises(CheckpointError) as refused:
            load(tmp_path, requantize)
        assert str(refused.value).removeprefix(str(tmp_path)).removeprefix("/") == sentence


SYMMETRIC: dict[str, tuple[Encoder, Said | None]] = {
    "gptq": (gptq, GPTQ | {"checkpoint_format": "gptq", "dynamic": {"-:.*shared_expert.*": {}}}),
    "awq": (awq, AWQ | {"zero_point": False, "modules_to_not_convert": ["gate"]}),
    "gptq without a word": (gptq, None),
}
each_symmetric = pytest.mark.parametrize("name", SYMMETRIC)


@each_symmetric
def test_symmetric_integers_of_gptq_and_awq_are_exact(name: str, tmp_path: Path) -> None:
    encoder, said = SYMMETRIC[name]
    gate_up, down = write(tmp_path, encoder, sizes=(512, 256), quantization=said)
    for experts in (None, "1-2"):
        held = slice(None) if experts is None else slice(1, 3)
        weights = load(tmp_path, experts=experts, takes=frozenset(WeightFormat))
        check_four_bits(weights.gate_up, gate_up[held], "int4")
        check_four_bits(weights.down, down[held], "int4")
    with pytest.raises(
        CheckpointError, match=r"w1\.qweight: expected .*, got int4; with requantize: allow, it "
    ):
        load(tmp_path)
    rounded = load(tmp_path, "allow")
    check(rounded.gate_up, gate_up, name, is_native=False)
    check(rounded.down, down, name, is_native=False)


@each_symmetric
def test_other_zero_points_are_refused(name: str, tmp_path: Path) -> None:
    encoder, said = SYMMETRIC[name]

    def change(suffix: str, tensor: Tensor) -> Tensor:
        return tensor - 2**20 if suffix == ".qzeros" else tensor

    write(tmp_path, encoder, change=change, quantization=said)
    expected = (
        rf"qzeros: expected symmetric numbers, whose zero points are all {8 if name == 'awq' else 7}, got"
    )
    for requantize in ("refuse", "always"):
        with pytest.raises(CheckpointError, match=expected):
            load(tmp_path, requantize, takes=frozenset(WeightFormat))


def test_groups_out_of_order_are_refused(tmp_path: Path) -> None:
    def change(suffix: str, tensor: Tensor) -> Tensor:
        return tensor.flip(0) if suffix == ".g_idx" else tensor

    write(tmp_path, gptq, change=change, quantization=None)
    expected = r"g_idx: expected groups of columns in order \(desc_act: false\), got others"
    for requantize in ("refuse", "always"):
        with pytest.raises(CheckpointError, match=expected):
            load(tmp_path, requantize, takes=frozenset(WeightFormat))


@pytest.mark.parametrize("suffix", ["qzeros", "g_idx"])
def test_tensors_beside_gptqs_have_their_shapes(suffix: str, tmp_path: Path) -> None:
    def change(at: str, tensor: Tensor) -> Tensor:
        return tensor[:-1] if at == f".{suffix}" and len(tensor) > 1 else tensor

    write(tmp_path, gptq, change=change, quantization=None)
    with pytest.raises(CheckpointError, match=rf"{suffix} shape: expected \(.*\), got "):
        load(tmp_path, takes=frozenset(WeightFormat))


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(
    "said",
    [
        compressed(INT8, ignore=[r"re:^model\.layers\.\d+\..*experts.*"]),
        compressed(INT8, group(8, "float", [f"{BLOCK}.experts.{index}.w{part}" for index in range(4)
                                            for part in (1, 2, 3)])),
        modelopt("W4A8_AWQ", exclude_modules=["model.layers.0.block_sparse_moe.experts*"]),
        mixed(attention="NVFP4", experts="FP8_PB_WO"),
    ],
)  # fmt: skip
def test_layers_may_have_other_prefixes_where_they_are_named(said: Said, prefix: str, tmp_path: Path) -> None:
    write(tmp_path, "fp8 by block", quantization=said)
    file = tmp_path / "model.safetensors"
    save_file(
        {name.replace("model.layers.", prefix): tensor for name, tensor in load_file(file).items()}, file
    )
    load(tmp_path)
    edit_json(tmp_path / "config.json", quantization_config=compressed(INT8))
    with pytest.raises(CheckpointError, match=rf"type 'int' for {prefix}0\..*, whose tensors are FP8"):
        load(tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stacks_are_meant_by_the_names_of_their_modules(layout: str, tmp_path: Path) -> None:
    form = LAYOUTS[layout]
    name = f"model.layers.0.{form.block}.{form.names[0].replace('E', '0')}"
    write(tmp_path, "fp8 by block", layout, quantization=compressed(group(8, "int", [name])))
    with pytest.raises(CheckpointError, match=rf"type 'int' for {name}, whose tensors are FP8"):
        load(tmp_path, "allow")
    edit_json(tmp_path / "config.json", quantization_config=compressed(INT8, ignore=[name]))
    with pytest.raises(CheckpointError, match=r"type 'int' for .*, whose tensors are FP8") as refused:
        load(tmp_path, "allow")
    assert name not in str(refused.value)


@pytest.mark.parametrize(
    ("config", "own", "message"),
    [
        ({}, {"quantization": {"quant_algo": "FP8_PB_WO"}}, None),
        ({}, {"quantization": None}, None),
        ({}, {"quantization": "fp8"}, r"hf_quant_config\.json: quantization: expected an object, got 'fp8'$"),
        (
            {}, {"quantization": {"quant_algo": "W4A8_AWQ"}},
            r"hf_quant_config\.json: quantization\.quant_algo: expected FP8, .*, got 'W4A8_AWQ' for ",
        ),
        ({"quantization_config": modelopt("FP8_PB_WO")}, {"quantization": {"quant_algo": "W4A8_AWQ"}}, None),
        ({"compression_config": compressed(INT8)}, None, r"compression_config\.config_groups.*type 'int'"),
        ({"compression_config": []}, None, r"compression_config: expected an object, got \[\]$"),
        ({"expert_dtype": "fp4", "quantization_config": autofp8("dynamic")}, None, r"json: expert_dtype: "),
        ({"expert_dtype": "fp4"}, None, None),
    ],
)  # fmt: skip
def test_it_is_said_in_several_places(
    config: Said, own: Said | None, message: str | None, tmp_path: Path
) -> None:
    write(tmp_path, "fp8 by block", quantization=None)
    edit_json(tmp_path / "config.json", **config)
    if own is not None:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(own))
    if message is None:
        load(tmp_path)
        return
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)
