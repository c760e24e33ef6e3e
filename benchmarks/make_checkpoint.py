"""Makes a checkpoint of random weights: `python -m benchmarks.make_checkpoint DIRECTORY [--like MODEL]`.

Writes the MoE layers of a model, with the tensor names and the FP8 form of its family's checkpoints: a
stand-in to try or time a server without downloading weights. MODEL is a directory with a config.json, which
gives the sizes; without it, the model is a small DeepSeek-V3. Each layer is one file, made in memory. Unless
some layers are named, the rest of the model is written, too, in bf16, so that transformers loads all of it.
"""

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from expertd.kernels import quantize_blocks
from expertd.service.checkpoints import CheckpointError, MoEModel, read_model
from expertd.service.settings.spans import numbers

SMALL = {
    "model_type": "deepseek_v3", "torch_dtype": "bfloat16",
    "num_hidden_layers": 3, "first_k_dense_replace": 1, "hidden_size": 256,
    "moe_intermediate_size": 128, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3,
    "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    "vocab_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4,
    "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
    "max_position_embeddings": 4096, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}  # fmt: skip


def make_checkpoint(directory: Path, like: Path | None = None, layers: str | None = None) -> list[int]:
    """Write `directory`, which must not exist; returns the layers in it. Raises CheckpointError, ValueError.

    like    a directory with a config.json; None: `SMALL`
    layers  MoE layers of it, as in 3-5,9; None: all
    """
    with tempfile.TemporaryDirectory(dir=directory.parent) as temporary:
        made = Path(temporary) / directory.name
        made.mkdir()
        model = _configure(made, like)
        chosen = list(model.layers) if layers is None else numbers(layers)
        if missing := set(chosen) - set(model.layers):
            raise ValueError(f"layers: expected MoE layers of the model, got {min(missing)}")
        weight_map: dict[str, str] = {}
        num_bytes = 0
        parts = ((f"layer-{layer}", partial(_layer, model, layer)) for layer in chosen)
        is_whole = layers is None and model.family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        rest = [("rest", partial(_rest, made))] if is_whole else []
        for name, make in (*parts, *rest):
            tensors = make()
            file = f"{name}.safetensors"
            save_file(tensors, made / file, {"format": "pt"})
            weight_map |= dict.fromkeys(tensors, file)
            num_bytes += sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        (made / "model.safetensors.index.json").write_text(json.dumps(index) + "\n")
        made.rename(directory)
    return chosen


def _configure(made: Path, like: Path | None) -> MoEModel:
    """Write config.json, and return the model it describes."""
    if like is None:
        (made / "config.json").write_text(json.dumps(SMALL, indent=1) + "\n")
        return read_model(made)
    model = read_model(like)
    config = json.loads((like / "config.json").read_text())
    said = ("compression_config", "expert_dtype")  # of other tensors than those that are made
    config = {key: value for key, value in config.items() if key not in said}
    config["quantization_config"] = SMALL["quantization_config"]
    (made / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return model


def _rest(made: Path) -> dict[str, Tensor]:
    """All other tensors of the model, by transformers' names; config.json then says that they are not FP8."""
    config = AutoConfig.from_pretrained(made)
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config)
    blocks = tuple(f"{name}." for name, module in whole.named_modules() if hasattr(module, "experts"))
    generator = torch.Generator().manual_seed(2**31)
    tensors = {
        name: (
            _normal(size, generator) if len(size := tuple(each.shape)) > 1 else torch.ones(size)
        ).bfloat16()
        for name, each in whole.named_parameters()
        if not name.startswith(blocks)
    }
    values = json.loads((made / "config.json").read_text())
    values["quantization_config"] = {
        **values["quantization_config"],
        "modules_to_not_convert": [
            name
            for name, module in whole.named_modules()
            if isinstance(module, torch.nn.Linear) and not name.startswith(blocks)
        ],
    }
    (made / "config.json").write_text(json.dumps(values, indent=1) + "\n")
    return tensors


def _layer(model: MoEModel, layer: int) -> dict[str, Tensor]:
    """The tensors of one layer by name; the same numbers in every run."""
    generator, names, tensors = torch.Generator().manual_seed(layer), model.names, {}
    prefix = f"model.layers.{layer}"

    def expert(name: str, projections: tuple[str, str, str], intermediate: int) -> None:
        sizes = (intermediate, model.hidden_size), (model.hidden_size, intermediate)
        for part, size in zip(projections, (sizes[0], *sizes), strict=True):
            data, scales = quantize_blocks(_normal(size, generator))
            tensors[f"{prefix}.{name}.{part}.weight"] = data
            tensors[f"{prefix}.{name}.{part}.weight_scale_inv"] = scales

    router = _normal((model.num_experts, model.hidden_size), generator)
    tensors[f"{prefix}.{names.router}"] = router.to(torch.bfloat16)
    if names.router_bias is not None:
        bias = torch.randn(model.num_experts, generator=generator) * 0.1
        tensors[f"{prefix}.{names.router_bias}"] = bias
    for index in range(model.num_experts):
        expert(f"{names.experts}.{index}", names.projections, model.intermediate_size)
    if model.num_shared_experts:
        projections = names.shared_projections or names.projections
        expert(names.shared, projections, model.num_shared_experts * model.intermediate_size)
    return tensors


def _normal(size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Variance 1 / columns, so that a product keeps the size of its input."""
    return torch.randn(size, generator=generator).mul_(size[-1] ** -0.5)


def main() -> None:
    """Make the checkpoint."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="directory to create")
    parser.add_argument(
        "--like",
        type=Path,
        metavar="MODEL",
        help="directory with a config.json (default: a small DeepSeek-V3)",
    )
    parser.add_argument("--layers", help="MoE layers to make, as in 3-5,9 (default: all)")
    options = parser.parse_args()
    if options.directory.exists():
        parser.error(f"a directory that does not exist yet is expected, got {options.directory}")
    try:
        layers = make_checkpoint(options.directory, options.like, options.layers)
    except (CheckpointError, ValueError, OSError) as error:
        sys.exit(f"benchmarks.make_checkpoint: {error}")
    print(f"{options.directory}: MoE layers {', '.join(map(str, layers))}")


if __name__ == "__main__":
    main()
