"""`python -m tests.generating MODEL DTYPE`: SGLang's model runner on a CPU; the last line is JSON.

expert_parameters  numbers in routed experts
log_probabilities  [steps, prompts, vocabulary]: after the prompts, and after each of the same further tokens
"""

import json
import random
import sys
from array import array
from typing import Any

import torch

VOCABULARY, LENGTHS, STEPS = 320, (1, 17, 40), 4


def main(model_path: str, dtype: str) -> None:
    import transformers

    from tests.absent import Finder

    for name in ("AutoProcessor", "AutoModelForCausalLM"):  # whose own imports look for packages
        getattr(transformers, name)
    sys.meta_path.append(Finder())
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.benchmark import one_batch
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import PortArgs, ServerArgs

    arguments: Any = ServerArgs(
        model_path=model_path, dtype=dtype, device="cpu", attention_backend="torch_native",
        sampling_backend="pytorch", disable_cuda_graph=True, disable_shared_experts_fusion=True,
        max_total_tokens=512, mem_fraction_static=0.1,
    )  # fmt: skip
    arguments.resolve_once()
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=0, gpu_id=0))
    one_batch._init_process_global_configs()
    runner, _ = one_batch.load_model(arguments, PortArgs.init_new(arguments), 0, 0)
    parameters = runner.torch_runner.model.named_parameters()
    count = sum(value.numel() for name, value in parameters if ".experts." in name)
    numbers = random.Random(1)
    with torch.no_grad():
        _, logits, batch = runner.extend([request(numbers, length) for length in LENGTHS])
        steps = [logits]
        while len(steps) < STEPS:
            tokens = torch.tensor([numbers.randrange(VOCABULARY) for _ in LENGTHS])
            steps.append(runner.decode(tokens, batch)[1])
    rows = torch.stack(steps).float().log_softmax(-1)[..., :VOCABULARY]
    print(json.dumps({"expert_parameters": count, "log_probabilities": rows.tolist()}))


def request(numbers: random.Random, length: int) -> Any:
    """With a prompt of this many random tokens."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    prompt = array("q", [numbers.randrange(VOCABULARY) for _ in range(length)])
    sampling = SamplingParams(temperature=0, max_new_tokens=STEPS)
    made = Req(rid=str(length), origin_input_text="", origin_input_ids=prompt, sampling_params=sampling)
    made.full_untruncated_fill_ids, made.logprob_start_len, made.extend_end = prompt, -1, length
    return made


if __name__ == "__main__":
    main(*sys.argv[1:])
