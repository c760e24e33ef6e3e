"""vLLM alone and with its experts on expertd: `python -m benchmarks engines --vllm PYTHON [--json FILE]`.

PYTHON has vLLM and expertd-vllm. For each shape, a checkpoint's configuration without weights is made; vLLM
computes with random ones on the first GPU. An expertd server has the MoE layers on the last GPU. Both vLLMs
run in turns, `--turns` times, each in a process of its own with all prompts and batches.

way     alone: vLLM's own experts; else the plugin's transport (device: in full CUDA graphs; channel, http)
decode  ms of a step: the time of `--tokens` tokens after the first, by their number; the least of three, the
        median of turns; ratio: to `alone` in the same run
ttft    ms until all prompts of the batch have their first token, likewise
tokens  tokens/s of decode; per_gpu: divided by the GPUs of the way (alone 1, else 2)
busy    share of the time of decode in which each GPU ran a kernel, by NVML, which counts one that waits
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.lib.processes import free_port, running
from benchmarks.lib.run import Result, Row, new_parser

KEYS = "shape", "layers", "way", "prompt", "batch"
_PROGRAM = Path(__file__).with_name("vllm_program.py")
_COMMON = {
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "attention_bias": False, "norm_topk_prob": True, "vocab_size": 32000,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    },
}  # fmt: skip


class Shape(NamedTuple):
    """A model: its config.json, how many of its first layers are dense, and the experts of the others."""

    config: dict[str, Any]
    dense: int
    experts: dict[str, int]

    def config_of(self, moe_layers: int) -> dict[str, Any]:
        """That of the checkpoint."""
        return _COMMON | self.config | {"num_hidden_layers": self.dense + moe_layers}

    def served(self, moe_layers: int) -> list[dict[str, Any]]:
        """The server's models."""
        numbers = range(self.dense, self.dense + moe_layers)
        return [{"name": f"bench.layers.{number}", **self.experts} for number in numbers]


SHAPES = {
    "qwen3-30b": Shape(
        {
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
            "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
            "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
            "rope_theta": 1e6, "decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.001,
        },
        0,
        {"hidden_size": 2048, "intermediate_size": 768, "num_experts": 128, "top_k": 8},
    ),
    "deepseek-v3": Shape(
        {
            "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
            "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
            "num_experts_per_tok": 8, "n_shared_experts": 1, "num_attention_heads": 128,
            "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "n_group": 8, "topk_group": 4,
            "topk_method": "noaux_tc", "scoring_func": "sigmoid", "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 1, "moe_layer_freq": 1, "rope_theta": 10000.0, "ep_size": 1,
            "aux_loss_alpha": 0.001,
        },
        1,
        {"hidden_size": 7168, "intermediate_size": 2048, "num_experts": 256, "top_k": 8},
    ),
    # For a try without a GPU.
    "tiny": Shape(
        {
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 256,
            "intermediate_size": 256, "moe_intermediate_size": 128, "num_experts": 8,
            "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
            "rope_theta": 1e6, "decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.001,
            "quantization_config": None,
        },
        0,
        {"hidden_size": 256, "intermediate_size": 128, "num_experts": 8, "top_k": 2},
    ),
}  # fmt: skip


def main() -> None:
    """Measure every shape."""
    options = _options()
    versions = _program(options.vllm, {"versions": True})[0]
    about = {**versions, "tokens": options.tokens, "turns": options.turns, "layers": options.layers}
    result = Result(options.json, about, keys=KEYS)
    for shape in options.shapes.split(","):
        with tempfile.TemporaryDirectory() as folder, _server(SHAPES[shape], options, folder) as url:
            for row in measure(shape, options, folder, url):
                result.put(row)


def measure(shape: str, options: argparse.Namespace, folder: str, url: str) -> Iterator[Row]:
    """The rows of a shape."""
    ways = ["alone", *options.ways.split(",")]
    model = Path(folder, "model")
    model.mkdir()
    config = SHAPES[shape].config_of(options.layers)
    (model / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )
    found: dict[tuple[str, int, int], list[Row]] = {}
    for _ in range(options.turns):
        for way in ways:
            asked = {
                "model": str(model), "way": way, "url": url, "tokens": options.tokens, "max_model_len": 4096,
                "prompts": _numbers(options.prompts), "batches": _numbers(options.batches),
            }  # fmt: skip
            for row in _program(options.vllm, asked):
                found.setdefault((way, row["prompt"], row["batch"]), []).append(row)
    yield from rows_of(shape, options.layers, found)


def rows_of(shape: str, layers: int, found: dict[tuple[str, int, int], list[Row]]) -> Iterator[Row]:
    """By way, prompt and batch: the medians of what was `found` in all turns."""
    for (way, prompt, batch), turns in found.items():

        def median(name: str, way: str = way, prompt: int = prompt, batch: int = batch) -> float:
            return float(statistics.median(turn[name] for turn in found[way, prompt, batch]))

        decode, ttft = median("decode_ms"), median("ttft_ms")
        rate = batch / decode * 1e3
        yield {
            "shape": shape, "layers": layers, "way": way, "prompt": prompt, "batch": batch,
            "decode_ms": decode, "decode_ratio": decode / median("decode_ms", "alone"),
            "ttft_ms": ttft, "ttft_ratio": ttft / median("ttft_ms", "alone"),
            "tokens_per_s": rate, "per_gpu": rate / (1 if way == "alone" else 2),
            "busy": turns[-1]["busy"],
        }  # fmt: skip


@contextmanager
def _server(shape: Shape, options: argparse.Namespace, folder: str) -> Iterator[str]:
    """The URL of a server with the shape's MoE layers, on the last GPU."""
    config, port = Path(folder, "expertd.yaml"), free_port()
    channels = {"socket": f"{folder}/channels"}
    config.write_text(
        json.dumps({"host": "127.0.0.1", "models": shape.served(options.layers), "channels": channels})
    )
    program = "import sys; from expertd.service.cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["-c", program, "serve", "--config", str(config), "--port", str(port)]
    with running(arguments, port, CUDA_VISIBLE_DEVICES=options.server_gpu):
        yield f"http://127.0.0.1:{port}"


def _program(python: str, asked: Row) -> list[Row]:
    """What a process of vLLM answers. Raises CalledProcessError."""
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [python, str(_PROGRAM), json.dumps(asked)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, cwd="/tmp")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--vllm", required=True, metavar="PYTHON", help="that has vLLM and expertd-vllm")
    parser.add_argument("--shapes", default="qwen3-30b", help=f"of {', '.join(SHAPES)}; separated by commas")
    parser.add_argument("--layers", type=int, default=8, help="MoE layers")
    parser.add_argument("--ways", default="device", help="beside alone: device, channel, http")
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--prompts", default="32,2048", help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="of the answers, after the first")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--server-gpu", default="1", help="CUDA_VISIBLE_DEVICES of the server")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
