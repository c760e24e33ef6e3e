"""Small checkpoints of every family: built and saved by transformers, quantized to FP8 block by block."""

import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from expertd.service.checkpoints.families import FAMILIES as SERVED
from tests.families import FamilyCase, Sizes, quiet_transformers
from tests.kernels.helpers import fresh_generator
from tests.more_families import ALL_FAMILIES
from tests.service.checkpoints.encoders import ENCODERS
from tests.service.checkpoints.encoders import mxfp4 as encode_mxfp4

INDEX = "model.safetensors.index.json"


class Checkpoint:
    """A family's checkpoint in `directory`, and `oracle`, transformers' float32 model of the same weights."""

    def __init__(
        self,
        family: str,
        directory: Path,
        scales_dtype: torch.dtype | None = None,
        *,
        mxfp4: bool = False,
        routed: str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        sizes: Sizes = Sizes(),  # noqa: B008  (a tuple)
    ) -> None:
        """Weights are of `dtype`; if scales_dtype is given, the experts' are FP8; or they are MXFP4.

        routed  the encoding of routed experts alone, each in tensors of its own, a name in ENCODERS
        """
        case = ALL_FAMILIES[family].sized(sizes)
        self.family, self.directory = family, directory
        quantized = scales_dtype is not None or mxfp4 or routed is not None
        with quiet_transformers():
            with patch.object(Tensor, "normal_", _of_vectors):
                model = case.model_class(case.config())
            _randomize(model)
            model.to(dtype).save_pretrained(directory, max_shard_size="600KB")
            self.oracle = (
                _quantize_files(directory, case, scales_dtype, mxfp4=mxfp4, routed=routed)
                if quantized
                else model.float()
            ).eval()
            _rename(directory, case.renames)
        edit_json(directory / "config.json", model_type=case.model_type)
        nest_config(directory / "config.json")

    def block(self, layer: int) -> Any:
        """transformers' MoE block of a layer."""
        layers = getattr(self.oracle, "model", self.oracle).layers
        return next(
            getattr(layers[layer], name)
            for name in ("mlp", "feed_forward", "block_sparse_moe")
            if hasattr(layers[layer], name)
        )

    @torch.no_grad()
    def run(self, layer: int, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(output [T, H], topk_ids [T, k], topk_weights [T, k]) of the block, in float32."""
        block, seen = self.block(layer), []
        hook = block.experts.register_forward_pre_hook(lambda _, arguments: seen.append(arguments))
        with quiet_transformers():
            out = block(hidden_states[None].float())
        hook.remove()
        out = out[0] if isinstance(out, tuple) else out
        if len(seen[0]) == 1:  # Llama 4 weighs the experts' input, and runs all of them
            weights, ids = block.router(hidden_states.float())[0].topk(block.top_k, dim=-1)
            return out.view(hidden_states.shape), ids, weights
        return out[0], seen[0][1], seen[0][2] * ALL_FAMILIES[self.family].scaled_after


def edit_json(path: Path, **changes: object) -> None:
    """Set top-level keys of a JSON file; `...` removes one."""
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))


def nest_config(path: Path) -> None:
    """Move what config.json says of the language model to where its family has it."""
    values = json.loads(path.read_text())
    model_type = values["model_type"]
    for key in reversed(SERVED[model_type].inside):
        values = {key: values}
    path.write_text(json.dumps(values | {"model_type": model_type}))


def shard_of(directory: Path, name: str) -> Path:
    """The file that holds a tensor."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    return directory / str(index["weight_map"][name])


def edit_tensors(file: Path, **changes: Tensor | None) -> None:
    """Replace or add tensors of a safetensors file (names keep their dots); None removes one."""
    tensors = load_file(file) | changes
    save_file({name: value for name, value in tensors.items() if value is not None}, file)


_draw = Tensor.normal_


def _of_vectors(tensor: Tensor, *mean_and_std: Any, **options: Any) -> Tensor:
    """`Tensor.normal_`, but a matrix is left as it is: `_randomize` sets all of them."""
    return tensor if tensor.ndim >= 2 else _draw(tensor, *mean_and_std, **options)


def _randomize(model: Any) -> None:
    """Weights that keep the magnitude of a token, and biases large enough to affect choices."""
    generator = fresh_generator()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            tensor.data.normal_(-0.3, 0.2, generator=generator)
        elif name.endswith(("gate_up_proj_bias", "down_proj_bias", "router.bias")):
            tensor.data.normal_(0, 0.5, generator=generator)
        elif tensor.ndim >= 2 and tensor.is_floating_point():
            tensor.data.normal_(0, tensor.shape[-1] ** -0.5, generator=generator)


def _rename(directory: Path, renames: tuple[tuple[str, str], ...]) -> None:
    """Give tensors the names that they have in the models' own checkpoints."""
    if not renames:
        return

    def renamed(name: str) -> str:
        for pattern, replacement in renames:
            name = re.sub(pattern, replacement, name)
        return name

    index = json.loads((directory / INDEX).read_text())
    for file in sorted(directory.glob("*.safetensors")):
        tensors = {renamed(name): value for name, value in load_file(file).items()}
        for name in [name for name in tensors if "gate_up_proj.weight" in name]:
            halves = tensors.pop(name).chunk(2, dim=-2)
            for half, value in zip(("gate", "up"), halves, strict=True):
                tensors[name.replace("gate_up", half)] = value.contiguous()
        save_file(tensors, file)
        index["weight_map"] = {
            name: at for name, at in index["weight_map"].items() if at != file.name
        } | dict.fromkeys(tensors, file.name)
    (directory / INDEX).write_text(json.dumps(index))


def _quantize_files(
    directory: Path, case: FamilyCase, scales_dtype: torch.dtype | None, *, mxfp4: bool, routed: str | None
) -> Any:
    """Encode the experts' weights as `Checkpoint` says; returns the model of what they mean."""
    with tempfile.TemporaryDirectory() as temporary:
        plain = Path(temporary) / "plain"
        shutil.copytree(directory, plain)
        if scales_dtype is not None:
            _to_fp8(directory, plain, scales_dtype)
        if mxfp4:
            _to_mxfp4(directory, plain)
        if routed is not None:
            _encode_routed(directory, plain, routed)
        return case.model_class.from_pretrained(plain, dtype=torch.float32)


def _to_fp8(directory: Path, plain: Path, scales_dtype: torch.dtype) -> None:
    """Quantize the experts' weights in `directory`, and write their dequantized values to `plain`."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    for file in sorted(directory.glob("*.safetensors")):
        tensors = load_file(file)
        meant = dict(tensors)
        for name in filter(_is_expert, list(tensors)):
            data, scales = _quantize(tensors[name].float(), scales_dtype)
            tensors[name], tensors[f"{name}_scale_inv"] = data, scales
            meant[name] = _blocks(scales.float(), data.shape) * data.float()
            index["weight_map"][f"{name}_scale_inv"] = file.name
        save_file(tensors, file)
        save_file(meant, plain / file.name, metadata={"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    edit_json(
        directory / "config.json",
        quantization_config={
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
    )  # fmt: skip


def _to_mxfp4(directory: Path, plain: Path) -> None:
    """Store the experts' matrices [E, k, n] as gpt-oss does, and write their decoded values to `plain`."""
    index = json.loads((directory / INDEX).read_text())
    for file in sorted(directory.glob("*.safetensors")):
        tensors = load_file(file)
        meant = dict(tensors)
        for name in [name for name in tensors if re.search(r"experts\.\w+_proj$", name)]:
            encoded = [encode_mxfp4(matrix.t().contiguous()) for matrix in tensors.pop(name).float()]
            packed, scales = (
                torch.stack([part[suffix].view(torch.uint8) for part, _ in encoded])
                for suffix in (".weight", ".scale")
            )
            tensors[f"{name}_blocks"] = packed.view(*scales.shape, 16)
            tensors[f"{name}_scales"] = scales
            meant[name] = torch.stack([values.t() for _, values in encoded]).contiguous()
            del index["weight_map"][name]
            index["weight_map"] |= dict.fromkeys((f"{name}_blocks", f"{name}_scales"), file.name)
        save_file(tensors, file)
        save_file(meant, plain / file.name, metadata={"format": "pt"})
    (directory / INDEX).write_text(json.dumps(index))
    edit_json(directory / "config.json", quantization_config={"quant_method": "mxfp4"})


def _encode_routed(directory: Path, plain: Path, encoding: str) -> None:
    """Encode the routed experts' weights in `directory`, and write their decoded values to `plain`."""
    encode, _, said = ENCODERS[encoding]
    index = json.loads((directory / INDEX).read_text())
    floats = {name: t for file in plain.glob("*.safetensors") for name, t in load_file(file).items()}
    for file in sorted(directory.glob("*.safetensors")):
        tensors = load_file(file)
        meant = {name: floats[name] for name in tensors if name in floats}
        for name in [
            name for name in tensors if re.search(r"\.experts\.\d+\.(\w+_proj|w[123])\.weight$", name)
        ]:
            encoded, meant[name] = encode(floats[name].float())
            del tensors[name], index["weight_map"][name]
            tensors.pop(f"{name}_scale_inv", None), index["weight_map"].pop(f"{name}_scale_inv", None)
            own = {name.removesuffix(".weight") + suffix: tensor for suffix, tensor in encoded.items()}
            tensors |= own
            index["weight_map"] |= dict.fromkeys(own, file.name)
        save_file(tensors, file)
        save_file(meant, plain / file.name, metadata={"format": "pt"})
    (directory / INDEX).write_text(json.dumps(index))
    edit_json(directory / "config.json", quantization_config=said)


def _is_expert(name: str) -> bool:
    """Whether a tensor belongs to an expert, a shared one included, or to all of them."""
    of_experts = re.search(
        r"\.(experts\.\d+|experts|shared_experts?|shared_mlp)\.(\w+_proj|linear_gate)(\.weight)?$", name
    )
    return bool(of_experts or re.search(r"\.(w[123]|input_linear|output_linear)\.weight$", name))


def _quantize(weight: Tensor, scales_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    *_, n, k = weight.shape
    blocks = weight.view(-1, n // 128, 128, k // 128, 128)
    scales = (blocks.abs().amax(dim=(2, 4)) / 448).view(*weight.shape[:-2], n // 128, k // 128)
    if scales_dtype != torch.float32:  # rounded up, so that nothing overflows
        scales = torch.exp2(scales.log2().ceil())
    stored = scales.to(scales_dtype)
    return (weight / _blocks(stored.float(), weight.shape)).to(torch.float8_e4m3fn), stored


def _blocks(scales: Tensor, shape: torch.Size) -> Tensor:
    return scales.repeat_interleave(128, -2).repeat_interleave(128, -1)[..., : shape[-2], : shape[-1]]
