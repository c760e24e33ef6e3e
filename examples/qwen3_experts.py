"""A small Qwen3 of transformers whose experts run in expertd: `python -m examples.qwen3_experts`.

Makes a model of random weights with three MoE layers, serves all of them, and replaces each MoE block of the
model by a call. It prints what was called, and which experts the tokens went to.
"""

import re
import tempfile
from pathlib import Path
from urllib.request import urlopen

import torch
from transformers.utils import logging

from examples.in_process import load_layers
from examples.remote_experts import PROMPT, RemoteExperts, Traffic, generate, load_model
from examples.server import run_server
from examples.small_model import Sizes, make_checkpoint
from expertd_client import ExpertClient

NEW_TOKENS = 16


def tokens_of_experts(url: str, model: str) -> list[int]:
    """The tokens that each expert of a layer has computed, from the server's metrics."""
    with urlopen(f"{url}/metrics") as answer:
        text = answer.read().decode()
    pattern = rf'^expertd_expert_tokens_total{{expert="(\d+)",model="{re.escape(model)}"}} (\S+)$'
    found = {int(expert): round(float(count)) for expert, count in re.findall(pattern, text, re.M)}
    return [found[expert] for expert in sorted(found)]


def main() -> int:
    """Generate text both ways, and print what happened; 1 if the texts differ."""
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # threads of OpenMP spin while they wait, on cores that the server needs
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Path(directory) / "tiny-qwen3"
        make_checkpoint(checkpoint, "qwen3_moe", Sizes(), torch.bfloat16, "cpu")
        prompt = torch.tensor([list(PROMPT.encode())])
        with run_server(["--model", checkpoint, "--layers", "all"]) as url, ExpertClient(url) as client:
            print("layers on the server:", *(model.name for model in client.models()))
            traffic = Traffic()
            model = load_model(checkpoint, "cpu", lambda name: RemoteExperts(client, name, traffic))
            ids = generate(model, prompt, NEW_TOKENS)
            print(f"{prompt.numel()} tokens read and {NEW_TOKENS} written by {traffic.calls} calls")
            counts = tokens_of_experts(url, "tiny-qwen3.layers.0")
        local = load_model(checkpoint, "cpu", load_layers(checkpoint, "cpu").__getitem__)
        equal = bool(generate(local, prompt, NEW_TOKENS).equal(ids))
    print(f"the same experts in this process write {'the same' if equal else 'another'} text")
    for expert, count in enumerate(counts):
        print(f"  layer 0, expert {expert}: {'#' * count} {count} tokens")
    return 0 if equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
