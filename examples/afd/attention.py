"""Runs an attention worker beside expertd: `python -m examples.afd.attention --json timeline.json`.

Two micro-batches go through all layers, first in turns (sequential), then as ping-pong: the attention of one
runs while the experts of the other do. The results are the same; the time is not. Without --url, the example
starts a server with layers of random weights, on GPUs of its own if --server-gpus says so.
"""

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from examples.afd.experts import served_layers
from examples.afd.intervals import describe, times, write_timeline
from examples.afd.worker import SLOTS, Attention, AttentionSizes, Worker
from examples.arguments import device, positive
from examples.server import ServerError, run_server
from expertd_client import ExpertClient, ExpertError

RESULT_ERROR = 0.01  # a token's result may depend on its step, within rounding


def run(arguments: argparse.Namespace, url: str) -> bool:
    """Run both orders, and print what they took. False if results differ. Raises ExpertError."""
    dtype = getattr(torch, arguments.dtype)
    with ExpertClient(url, transport=arguments.transport) as client, ExitStack() as stack:
        hidden_size = client.metadata(client.models()[0].name).hidden_size
        sizes = AttentionSizes(hidden_size, arguments.tokens, arguments.context, arguments.heads)
        generator = torch.Generator().manual_seed(1)
        shape = len(SLOTS), arguments.tokens, hidden_size
        batches = torch.randn(shape, generator=generator).to(arguments.device, dtype)
        experts, transport = served_layers(client, arguments.transport, arguments.layers, batches[0], stack)
        worker = Worker(Attention(sizes, arguments.device, dtype), experts)
        results, measured = {}, {}
        for order in ("sequential", "ping-pong"):
            for _ in range(arguments.repeat):  # the last one counts
                results[order] = torch.stack(worker.run(list(batches), order == "ping-pong"))
            measured[order] = times(worker.intervals)
            print(f"{order:<10} {describe(measured[order])}")
        ratio = measured["ping-pong"].wall / measured["sequential"].wall
        print(f"ping-pong takes {ratio:.2f} of the sequential time, by {transport}")
        if arguments.json is not None:
            title = (
                f"two micro-batches of {arguments.tokens} tokens by {transport}: "
                f"{ratio:.2f} of the sequential time"
            )
            options = {name: str(value) for name, value in vars(arguments).items() if name != "json"}
            write_timeline(arguments.json, {"title": title, "options": options}, worker.intervals)
    return same(results["ping-pong"], results["sequential"])


def same(output: torch.Tensor, expected: torch.Tensor) -> bool:
    """Print and check the root mean square of the difference over that of `expected`."""
    error = float((output.double() - expected.double()).norm() / expected.double().norm())
    print(f"results differ by {error:.5%} (at most {RESULT_ERROR:.0%} expected)")
    return error <= RESULT_ERROR


def server_config(arguments: argparse.Namespace) -> dict[str, Any]:
    """A configuration of expertd with as many layers as the worker has, or as --served-layers says."""
    count = arguments.served_layers or arguments.layers
    layer = {
        "hidden_size": arguments.hidden_size, "intermediate_size": arguments.intermediate_size,
        "num_experts": arguments.num_experts, "top_k": arguments.top_k,
    }  # fmt: skip
    return {"models": [{"name": f"layer-{i}", "weights": {"seed": i}, **layer} for i in range(count)]}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.afd.attention", description="Runs an attention worker beside expertd."
    )
    parser.add_argument("--url", help="a running server; its layers are used (default: start one)")
    parser.add_argument(
        "--transport", choices=("auto", "channel", "http"), default="auto", help="to the server"
    )
    parser.add_argument(
        "--device", type=device, default="cpu", help="of attention: cpu (default), cuda, cuda:1"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of attention")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the times of the ping-pong")
    add_sizes(
        parser,
        layers=(4, "layers of the model"),
        tokens=(64, "sequences of a micro-batch"),
        context=(256, "cached tokens of each"),
        heads=(16, "attention heads of 64"),
        repeat=(3, "runs of each order; the last one counts"),
    )
    server = parser.add_argument_group("a server that is started")
    add_sizes(
        server,
        hidden_size=(512, "of a token"),
        intermediate_size=(256, "of an expert"),
        num_experts=(16, "of a layer"),
        top_k=(4, "experts of a token"),
    )
    server.add_argument(
        "--served-layers", type=positive, metavar="N", help="used in turn (default: --layers)"
    )
    server.add_argument(
        "--server-gpus", metavar="LIST", help="its CUDA_VISIBLE_DEVICES, as in 1,0: it computes on the first"
    )
    return parser.parse_args(argv)


def add_sizes(parser: argparse._ActionsContainer, **sizes: tuple[int, str]) -> None:
    """Arguments for whole numbers: default and meaning by name."""
    for name, (default, what) in sizes.items():
        flag, text = f"--{name.replace('_', '-')}", f"{what} (default: {default})"
        parser.add_argument(flag, type=positive, default=default, metavar="N", help=text)


def main(argv: list[str] | None = None) -> int:
    """Run the example; returns the exit code, 1 if the orders' results differ."""
    arguments = parse(argv)
    if arguments.device == "cpu":
        torch.set_num_threads(1)  # threads of OpenMP spin while they wait, on cores that the server needs
    with ExitStack() as stack:
        url = arguments.url
        try:
            if url is None:
                config = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "config.yaml"
                config.write_text(json.dumps(server_config(arguments)))  # JSON is YAML
                gpus = arguments.server_gpus
                environment = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
                url = stack.enter_context(run_server(["--config", config], environment))
            return 0 if run(arguments, url) else 1
        except (ExpertError, ServerError) as error:
            print(f"examples.afd.attention: {error}", file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main())
