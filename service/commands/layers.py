"""`expertd layers`: lists a checkpoint's MoE layers and the size of each."""

import argparse
import json
import sys
from dataclasses import asdict
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from expertd.activation import COMMON
from expertd.backends import taking
from expertd.weight_format import WeightFormat

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from expertd.service.checkpoints.expand import ListedLayer
    from expertd.service.checkpoints.model import MoEModel

_SIZES = ("hidden_size", "intermediate_size", "num_experts", "num_shared_experts", "top_k")


def add_parser(subparsers: "_SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the subcommand to `subparsers`."""
    parser = subparsers.add_parser(
        "layers",
        help="list the MoE layers of a checkpoint",
        description="List the MoE layers of a checkpoint directory. Reads only headers.",
    )
    parser.add_argument("path", type=Path, help="the directory, as for serve --model")
    parser.add_argument(
        "--requantize",
        choices=("allow", "always", "refuse"),
        default="refuse",
        help="as for serve (default: refuse)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the list; return 0, or 2 if the checkpoint cannot be served."""
    from expertd.service.checkpoints import CheckpointError
    from expertd.service.checkpoints.expand import list_layers

    path = arguments.path.expanduser()
    try:
        model, layers = list_layers(path, arguments.requantize)
    except CheckpointError as error:
        print(f"expertd layers: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        _print_json(path, model, layers)
    else:
        _print_table(path, model, layers)
    return 0


def _print_json(path: Path, model: "MoEModel", layers: list["ListedLayer"]) -> None:
    sizes = {name: getattr(model, name) for name in _SIZES}
    listed = [asdict(layer) for layer in layers]
    about = {
        "path": str(path),
        "family": model.family,
        **sizes,
        "routing": model.routing,
        "router_bias": model.names.router_bias is not None,
        "bias_on": model.routing.get("bias_on", "choice"),
        "shared_gate": model.names.shared_gate is not None,
        "expert_biases": model.names.biases is not None,
        "experts": {layer.layer: model.rules.get(layer.layer, COMMON).text for layer in layers},
        "not_served": model.refused,
        "layers": listed,
    }
    print(json.dumps(about, indent=2, default=dict))


def _print_table(path: Path, model: "MoEModel", layers: list["ListedLayer"]) -> None:
    from expertd.service.settings.spans import spans

    print(f"{path}: {model.family}, {len(layers)} MoE layers")
    print(", ".join(f"{name} {getattr(model, name)}" for name in _SIZES))
    bias = ", with a bias" if model.names.router_bias is not None else ""
    print(f"routing: {', '.join(f'{name} {value}' for name, value in model.routing.items())}{bias}")
    gate = ", the shared one with a gate" if model.names.shared_gate is not None else ""
    gate += ", with biases" if model.names.biases is not None else ""
    for text in dict.fromkeys(model.rules.get(layer.layer, COMMON).text for layer in layers):
        print(f"experts: {text}{gate}")
    for why in dict.fromkeys(model.refused.values()):
        print(f"not served: {spans(layer for layer in model.refused if model.refused[layer] == why)}: {why}")
    rows: list[tuple[str, ...]] = [("layers", "weights", "served as", "bytes a layer", "of shared experts")]
    like = attrgetter("format", "served", "num_bytes", "shared_bytes")
    for (form, served, *sizes), group in groupby(layers, like):
        rows.append((spans(layer.layer for layer in group), form, served, *(f"{size:,}" for size in sizes)))
    if not model.num_shared_experts:
        rows = [row[:-1] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        columns = zip(row, "<<<>>", widths, strict=False)
        print("  ".join(f"{text:{side}{width}}" for text, side, width in columns))
    for each in WeightFormat:
        if each is not WeightFormat.FP8 and any(each in layer.served.split(" and ") for layer in layers):
            print(f"{each} needs backend {taking(each)}; others serve it in FP8, with --requantize allow")
