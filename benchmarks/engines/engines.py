"""vLLM alone and with its experts on expertd: `python -m benchmarks engines --vllm PYTHON [--json FILE]`.

PYTHON has vLLM and expertd-vllm. For each case, a shape with a number of MoE layers, a checkpoint's
configuration without weights is made; vLLM computes with random ones on the first GPU. An expertd server has
the MoE layers on the last GPU. A process of each way starts, and they take turns, prompt by prompt and batch
by batch, each idle while another measures. Each row is written at once, beside those that the file has: an
interrupted run keeps what it has, and another one may go on.

way     alone: vLLM's own experts; pieces: these in PIECEWISE CUDA graphs, between which vLLM launches
        attention; else the plugin's transport (device: in full CUDA graphs; channel, http: in pieces, too)
decode  ms of a step, which is the time per output token (TPOT): from the last prompt's first token, when
        all have theirs, until it has `--tokens` more, divided by these; the least of three, and the median of
        turns; ratio: to `alone` in the same run
ttft    ms until all prompts of the batch have their first token, likewise
tokens  tokens/s of decode; per_gpu: divided by the GPUs of the way (alone and pieces 1, else 2)
busy    share of the time in which each GPU ran a kernel, by NVML, which counts one that waits; in the
        second half of decode in a batch with four times as many tokens

All ways have one server. While a caller of `device` is connected, the server looks for its calls between
other requests: measure `channel` and `http` in a run without `device`.

There are no micro-batches: vLLM 0.33 has two only for data parallel ranks that exchange tokens by DeepEP or
NIXL, of which one attention GPU has none.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.engines.vllm_program import prefill_steps
from benchmarks.lib.processes import Program, free_port, running
from benchmarks.lib.run import Result, Row, earlier, new_parser

KEYS = "shape", "layers", "way", "prompt", "batch"
LOCAL = "alone", "pieces"  # ways without a server
_MAX_LENGTH = 4096  # of a sequence; vLLM wants a cache for one
_BLOCK = 128  # tokens, at most, that a cache has room for at once
_WATCHED = 4  # times as many tokens, during which GPUs are watched
_MOST_IN_GRAPH = 512  # tokens, of vLLM's graphs by default
_PROGRAM = Path(__file__).with_name("vllm_program.py")
_COMMON = {
    "max_position_embeddings": _MAX_LENGTH, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "attention_bias": False,
    "norm_topk_prob": True, "vocab_size": 32000,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    },
}  # fmt: skip


class Shape(NamedTuple):
    """A model: its config.json, how many of its first layers are dense, and the experts of the others.

    cached  numbers in bfloat16 that a layer keeps of a token
    """

    config: dict[str, Any]
    dense: int
    experts: dict[str, int]
    cached: int

    def config_of(self, moe_layers: int) -> dict[str, Any]:
        """The config.json of the checkpoint."""
        return _COMMON | self.config | {"num_hidden_layers": self.dense + moe_layers}

    def served(self, moe_layers: int) -> list[dict[str, Any]]:
        """The server's models."""
        numbers = range(self.dense, self.dense + moe_layers)
        return [{"name": f"bench.layers.{number}", **self.experts} for number in numbers]

    def cache_bytes(self, moe_layers: int, tokens: int) -> int:
        """Bytes of the KV cache for this many tokens, in all layers."""
        return 2 * self.cached * (self.dense + moe_layers) * tokens


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
        2 * 4 * 128,
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
        512 + 64,
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
        2 * 2 * 64,
    ),
}  # fmt: skip


def main() -> int:
    """Measure every case; 1 if one of them failed."""
    options = _options()
    with _program(options.vllm, {"versions": True}) as program:
        about = {**program.read(), "tokens": options.tokens, "turns": options.turns}
    result, failed = Result(options.json, about, earlier(options.json), KEYS), False
    for case in options.cases.split(","):
        try:
            with tempfile.TemporaryDirectory() as folder:
                for row in measure(*case_of(case), options, folder):
                    result.put(row)
        except RuntimeError as error:  # others may fit
            print(f"engines: {case}: {error}", file=sys.stderr, flush=True)
            failed = True
    return int(failed)


def case_of(text: str) -> tuple[str, int]:
    """The name of a shape and the number of its MoE layers. Raises SystemExit."""
    name, _, layers = text.partition(":")
    if name not in SHAPES or not layers.isdecimal() or not int(layers):
        sys.exit(f"--cases: expected {' or '.join(SHAPES)}, a colon and a number of layers, got {text!r}")
    return name, int(layers)


def measure(shape: str, layers: int, options: argparse.Namespace, folder: str) -> Iterator[Row]:
    """The rows of a case, one after the other. Raises RuntimeError if a process ends."""
    ways = ["alone", *options.ways.split(",")]
    model = Path(folder, "model")
    model.mkdir()
    config = SHAPES[shape].config_of(layers)
    (model / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )
    points = points_of(SHAPES[shape], layers, options)
    cache_bytes = max(SHAPES[shape].cache_bytes(layers, _cached(*point, options.tokens)) for point in points)
    with _server(SHAPES[shape], layers, options, folder) as url, ExitStack() as stack:
        made = {
            "model": str(model), "url": url, "max_model_len": _MAX_LENGTH, "cache_bytes": cache_bytes,
            "max_num_seqs": max(batch for _, batch in points), "graphs": _graphs(points),
        }  # fmt: skip
        programs = {way: stack.enter_context(_program(options.vllm, made | {"way": way})) for way in ways}
        for program in programs.values():
            stack.callback(program.process.kill)  # its own end takes longer
            program.read()  # it is ready
        for prompt, batch in points:
            turns: dict[str, list[Row]] = {way: [] for way in ways}
            for turn in range(options.turns):
                is_last = turn == options.turns - 1
                asked = {
                    "prompt": prompt, "batch": batch, "tokens": options.tokens,
                    "watched": _WATCHED * options.tokens if is_last else 0,
                }  # fmt: skip
                for way, program in programs.items():
                    program.write(asked)
                    turns[way].append(program.read())
            yield from rows_of({"shape": shape, "layers": layers, "prompt": prompt, "batch": batch}, turns)


def points_of(shape: Shape, layers: int, options: argparse.Namespace) -> list[tuple[int, int]]:
    """Tokens of a prompt and prompts of a batch, but for those whose cache would be too large."""
    points = [(prompt, batch) for prompt in _numbers(options.prompts) for batch in _numbers(options.batches)]
    room = options.cache_gb * 1e9
    return [point for point in points if shape.cache_bytes(layers, _cached(*point, options.tokens)) <= room]


def _graphs(points: Sequence[tuple[int, int]]) -> list[int]:
    """Numbers of tokens of CUDA graphs: of decode, and of short prompts. Others only take time to make."""
    prefill = {prompt * batch for prompt, batch in points}
    return sorted({batch for _, batch in points} | {tokens for tokens in prefill if tokens <= _MOST_IN_GRAPH})


def rows_of(point: Row, turns: dict[str, list[Row]]) -> Iterator[Row]:
    """By way: the medians of what was found in all turns at a `point`."""

    def median(way: str, name: str) -> float:
        return float(statistics.median(turn[name] for turn in turns[way]))

    for way in turns:
        decode, ttft = median(way, "decode_ms"), median(way, "ttft_ms")
        rate = point["batch"] / decode * 1e3
        yield {
            **point, "way": way,
            "decode_ms": decode, "decode_ratio": decode / median("alone", "decode_ms"),
            "ttft_ms": ttft, "ttft_ratio": ttft / median("alone", "ttft_ms"),
            "tokens_per_s": rate, "per_gpu": rate / (1 if way in LOCAL else 2),
            "busy": turns[way][-1]["busy"],
        }  # fmt: skip


@contextmanager
def _server(shape: Shape, layers: int, options: argparse.Namespace, folder: str) -> Iterator[str]:
    """The URL of a server with the shape's MoE layers, on the last GPU."""
    config, port = Path(folder, "expertd.yaml"), free_port()
    channels = {"socket": f"{folder}/channels"}
    config.write_text(json.dumps({"host": "127.0.0.1", "models": shape.served(layers), "channels": channels}))
    program = "import sys; from expertd.service.cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["-c", program, "serve", "--config", str(config), "--port", str(port)]
    with running(arguments, port, CUDA_VISIBLE_DEVICES=options.server_gpu):
        yield f"http://127.0.0.1:{port}"


def _program(python: str, made: Row) -> Program:
    """A process of vLLM. It compiles what it needs at the first repetition, which does not count."""
    more = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_DEEP_GEMM_WARMUP": "skip",
    }  # fmt: skip
    command = [str(Path(python).absolute()), str(_PROGRAM), json.dumps(made)]
    return Program(command, cwd="/tmp", **more)


def _cached(prompt: int, batch: int, tokens: int) -> int:
    """Tokens in the cache, at most."""
    longest = prompt + _WATCHED * tokens + prefill_steps(batch, prompt) + _BLOCK
    return max(batch * longest, _MAX_LENGTH) + _BLOCK


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--vllm", required=True, metavar="PYTHON", help="that has vLLM and expertd-vllm")
    text = f"{' or '.join(SHAPES)}, each with a number of MoE layers; the most important one first"
    parser.add_argument("--cases", default="qwen3-30b:8,deepseek-v3:4,qwen3-30b:48", help=text)
    parser.add_argument("--ways", default="device", help="beside alone: device, channel, http, pieces")
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--prompts", default="32,2048", help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="of the answers, after the first")
    parser.add_argument("--turns", type=int, default=2)
    text = "for the KV cache of each vLLM; prompts and batches that need more are left out"
    parser.add_argument("--cache-gb", type=float, default=40.0, help=text)
    parser.add_argument("--server-gpu", default="1", help="CUDA_VISIBLE_DEVICES of the server")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
