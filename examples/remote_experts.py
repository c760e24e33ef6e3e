"""Generates text with a model whose experts run in expertd: `python -m examples.remote_experts --compare`.

The model is one of transformers'. Its attention, norms and embeddings stay in this process. Each of its MoE
blocks is replaced by a module that sends hidden states to a server and returns the answer; all layers are
served from the model's own checkpoint directory. Without --url, the example starts a server and stops it.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from examples.arguments import device, positive
from examples.server import ServerError, run_server
from examples.small_model import FAMILIES, SIZE_UNIT, Sizes, make_checkpoint
from expertd_client import ExpertClient, ExpertError

PROMPT = "Attention is here, the experts are "
LAYER_ERROR = {"cpu": 0.005, "cuda": 0.045}  # of one layer's output, from docs/numerics.md


@dataclass
class Traffic:
    """Calls to the server, and the bytes of hidden states in both directions."""

    calls: int = 0
    num_bytes: int = 0


class RemoteExperts(torch.nn.Module):
    """Takes the place of a MoE block: `name` is the layer's on the server, which also routes."""

    def __init__(self, client: ExpertClient, name: str, traffic: Traffic) -> None:
        super().__init__()
        self._client, self._name, self._traffic = client, name, traffic

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        """The block's output [batch, length, H], of the dtype of `hidden_states` [batch, length, H].

        Some models pass the tokens' ids, too.
        """
        tokens = hidden_states.flatten(0, 1)
        output = self._client.infer(self._name, tokens)
        self._traffic.calls += 1
        self._traffic.num_bytes += tokens.nbytes + output.nbytes
        return output.view_as(hidden_states)


class WithRouting(torch.nn.Module):
    """Takes the place of a MoE block that returns its routing, too, which only training reads."""

    def __init__(self, experts: torch.nn.Module) -> None:
        super().__init__()
        self.block = experts

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        """The block's output, and nothing."""
        return self.block(hidden_states), None


def load_model(checkpoint: Path, device: str, experts: Callable[[str], torch.nn.Module]) -> Any:
    """The model with every MoE block replaced by `experts(name)`; names are those of `expertd serve`."""
    config = AutoConfig.from_pretrained(checkpoint)
    quantization = getattr(config, "quantization_config", None) or {}
    if quantization.get("quant_method") == "fp8":  # else transformers needs kernels from the hub on a GPU
        quantization["dequantize"] = True
    model = AutoModelForCausalLM.from_pretrained(checkpoint, config=config, dtype="auto")
    replace_blocks(model, lambda index: experts(f"{checkpoint.absolute().name}.layers.{index}"))
    return model.to(device).eval()


@torch.no_grad()
def replace_blocks(model: Any, experts: Callable[[int], torch.nn.Module | None]) -> None:
    """Replace the MoE block of each layer by `experts(index)`, of any family; None: keep it."""
    hidden_size = model.config.get_text_config().hidden_size
    for index, layer in enumerate(model.get_decoder().layers):
        for name, block in list(layer.named_children()):
            if not hasattr(block, "experts"):
                continue  # attention, norms and dense layers
            replacement = experts(index)
            if replacement is None:
                continue
            weight = next(block.parameters())
            zeros = torch.zeros(1, 1, hidden_size, dtype=weight.dtype, device=weight.device)
            if isinstance(block(zeros), tuple):
                replacement = WithRouting(replacement)
            setattr(layer, name, replacement)


@torch.inference_mode()
def generate(model: Any, prompt: Tensor, new_tokens: int) -> Tensor:
    """Greedy decoding: `prompt` [1, length] and `new_tokens` more."""
    ids: Tensor = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new_tokens, do_sample=False
    )
    return ids


@torch.inference_mode()
def difference(model: Any, other: Any, ids: Tensor) -> float:
    """The root mean square of the difference of two models' logits, over that of `other`'s."""
    logits, expected = model(ids).logits.double(), other(ids).logits.double()
    return float((logits - expected).norm() / expected.norm())


def run(arguments: argparse.Namespace, checkpoint: Path, url: str) -> bool:
    """Generate, and print what it took. False if a comparison failed. Raises ExpertError."""
    traffic = Traffic()
    tokenizer = load_tokenizer(checkpoint)
    prompt = as_ids(arguments.prompt, tokenizer).to(arguments.device)
    with ExpertClient(url, transport=arguments.transport) as client:
        model = load_model(checkpoint, arguments.device, lambda name: RemoteExperts(client, name, traffic))
        generate(
            model, prompt, arguments.new_tokens
        )  # opens connections, and loads kernels at their first use
        traffic.calls = traffic.num_bytes = 0
        begin = time.perf_counter()
        ids = generate(model, prompt, arguments.new_tokens)
        seconds = time.perf_counter() - begin
        new_tokens = ids.shape[1] - prompt.shape[1]  # fewer after the model's end of a text
        print(f"experts at {url} by {client.transport}: {as_text(ids, tokenizer)!r}")
        print(
            f"{new_tokens / seconds:.1f} tokens/s, {traffic.calls} calls, "
            f"{traffic.num_bytes / 1e6:.2f} MB of hidden states"
        )
        return not arguments.compare or compare(model, ids, prompt, checkpoint, arguments)


def compare(model: Any, ids: Tensor, prompt: Tensor, checkpoint: Path, arguments: argparse.Namespace) -> bool:
    """Whether the model with its experts in this process writes the same text, with logits that agree."""
    from examples.in_process import load_layers  # the server's code, which a client does not need

    layers = load_layers(checkpoint, arguments.device)
    local = load_model(checkpoint, arguments.device, layers.__getitem__)
    text_is_equal = generate(local, prompt, arguments.new_tokens).equal(ids)
    error, bound = difference(model, local, ids), LAYER_ERROR[prompt.device.type]
    print(
        f"experts in this process: {'the same text' if text_is_equal else 'another text'}, "
        f"logits differ by {error:.5%} (at most {bound:.1%} expected)"
    )
    return text_is_equal and error <= bound


def load_tokenizer(checkpoint: Path) -> Any:
    """The checkpoint's tokenizer; None: it has none, and tokens are bytes, as in a model that is made."""
    files = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    if not any((checkpoint / name).exists() for name in files):
        return None
    return AutoTokenizer.from_pretrained(checkpoint)


def as_ids(text: str, tokenizer: Any) -> Tensor:
    """The tokens [1, length] of a text."""
    ids: list[int] = list(text.encode()) if tokenizer is None else tokenizer(text).input_ids
    return torch.tensor([ids])


def as_text(ids: Tensor, tokenizer: Any) -> str:
    """The text of tokens [1, length]; random weights rarely write letters."""
    if tokenizer is None:
        return bytes(ids[0].tolist()).decode("latin-1")
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line's arguments."""
    description = "Generates text with a transformers model whose experts run in expertd."
    parser = argparse.ArgumentParser(prog="python -m examples.remote_experts", description=description)
    parser.add_argument("--url", help="a running server, which serves --checkpoint (default: start one)")
    parser.add_argument("--transport", default="auto", help="auto (default), channel or http")
    parser.add_argument(
        "--device", type=device, choices=("cpu", "cuda"), default="cpu", help="of attention; default: cpu"
    )
    parser.add_argument("--prompt", default=PROMPT, help="default: %(default)r")
    parser.add_argument("--new-tokens", type=positive, default=32, metavar="N", help="default: %(default)s")
    parser.add_argument("--compare", action="store_true", help="with the same experts in this process")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="directory of the model; made if it does not exist (default: a temporary one)",
    )
    made = parser.add_argument_group("a model that is made")
    made.add_argument("--family", choices=FAMILIES, default="qwen3_moe", help="default: %(default)s")
    made.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of its weights")
    for name in ("layers", "hidden_size", "num_experts"):
        flag, default = f"--{name.replace('_', '-')}", getattr(Sizes, name)
        made.add_argument(flag, type=positive, default=default, metavar="N", help="default: %(default)s")
    arguments = parser.parse_args(argv)
    if arguments.url and arguments.checkpoint is None:
        parser.error("--url: expected --checkpoint, the directory that it serves, too, got none")
    if arguments.hidden_size % SIZE_UNIT:
        parser.error(f"--hidden-size: expected a multiple of {SIZE_UNIT}, got {arguments.hidden_size}")
    if not arguments.prompt:
        parser.error("--prompt: expected at least one character, got none")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Run the example; returns the exit code, 1 if a comparison failed."""
    arguments = parse(argv)
    logging.disable_progress_bar()
    if arguments.device == "cpu":
        torch.set_num_threads(1)  # threads of OpenMP spin while they wait, on cores that the server needs
    with ExitStack() as stack:
        checkpoint = arguments.checkpoint
        if checkpoint is None:
            checkpoint = Path(stack.enter_context(tempfile.TemporaryDirectory())) / arguments.family
        if not checkpoint.exists():
            sizes = Sizes(arguments.layers, arguments.hidden_size, arguments.num_experts)
            dtype = getattr(torch, arguments.dtype)
            make_checkpoint(checkpoint, arguments.family, sizes, dtype, arguments.device)
        url = arguments.url
        try:
            if url is None:
                url = stack.enter_context(run_server(["--model", checkpoint, "--layers", "all"]))
            return 0 if run(arguments, checkpoint, url) else 1
        except (ExpertError, ServerError, ImportError) as error:  # what transformers needs for the encoding
            print(f"examples.remote_experts: {error}", file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main())
