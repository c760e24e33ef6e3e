"""A soak of a pool that vLLM calls: `python -m tests.soak.vllm --vllm PYTHON`; 1 if anything was wrong.

PYTHON has vLLM and expertd-vllm. Two expertd servers each have all experts of a small checkpoint, in FP8 on
GPUs. One `expertd-vllm serve` takes both as a pool. Threads ask it for chat completions, and compare them
with its answers before. Every `--every` seconds the server that computes more is killed, stopped for a while
or drained, in turn, and is back before the next.

--transport  of the plugin; `auto`: `device` on GPUs
lost         requests that raised an error, or had another status than 200
wrong        texts that differ from those before: on a GPU, vLLM's kernels do not depend on the batch here
late         requests that took longer than `--late` seconds. In memory of a GPU, calls wait for a server that
             is stopped: those requests are not counted (`waits`)
p50          ms of a request, p99 and max: while all servers are there (calm), and during each kind of event
--tokens     of a text. When a server hangs, all texts that vLLM computes take 0.65 s longer. They are more
             than 1 % of those during a stop, so theirs is the p99, which is at most three times that of
             calm ones if a text takes 0.35 s or more. If it takes much more, it hides that calls hang twice
pool         calls over HTTP to each server, by how they ended, as vLLM's metrics count them
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import torch
from prometheus_client.parser import text_string_to_metric_families

from expertd.service.settings.model import Settings
from tests.service.processes import EXPERTD
from tests.service.sockets import free_port
from tests.service.waiting import wait_for
from tests.soak.events import EventSoak, new_parser, reported
from tests.soak.server import SoakServer

CHECKPOINTS = Path(__file__).parents[2] / "engines" / "vllm" / "tests" / "checkpoints.py"
NAME, WORDS = "small", 300
CANDIDATES, PROMPTS, ROUNDS = 96, 12, 2
MARGIN = 0.1  # of log-probability, above what rounding in another batch changes
START_SECONDS = 600.0
SHOWN = 10  # wrong texts
LOOK_SECONDS = 0.5  # in which servers show who computes more
COMPUTED = "expertd_requests_total", "expertd_device_calls_total"
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_DEEP_GEMM_WARMUP": "skip", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive",
}  # fmt: skip
ON_GPU = "--gpu-memory-utilization=0.2", f"--kv-cache-memory-bytes={2 << 30}"
# A GPU's kernels for other numbers of tokens round differently, and FP8 makes much of that.
EXACT = {"VLLM_BATCH_INVARIANT": "1"}


class Given(NamedTuple):
    """What runs where; without GPUs, `server_gpus` is empty."""

    python: str
    expertd: str
    transport: str
    vllm_gpu: str
    server_gpus: list[str]
    callers: int
    tokens: int
    flags: list[str]

    @property
    def waits(self) -> list[str]:
        """The events for which calls wait."""
        return ["stop"] if self.server_gpus and self.transport in ("device", "channel", "auto") else []


class Text(NamedTuple):
    """An answer, and by how much each of its tokens was likelier than the next one, at least."""

    text: str
    margin: float


class Vllm:
    """`expertd-vllm serve`, in a process of its own."""

    def __init__(self, given: Given, model: Path, servers: Path, log: Path) -> None:
        port = free_port()
        self.url, self._tokens = f"http://127.0.0.1:{port}", given.tokens
        flags = [*ON_GPU] if given.server_gpus else ["--enforce-eager"]
        command = [
            given.python, "-m", "expertd_vllm", "serve", str(model), "--expertd", f"file:{servers}",
            "--port", str(port), "--served-model-name", NAME, "--max-model-len=256",
            f"--max-num-seqs={2 * given.callers}", "--no-enable-prefix-caching",
            f"--additional-config.expertd.transport={given.transport}", *flags, *given.flags,
        ]  # fmt: skip
        variables = ENVIRONMENT | os.environ
        if given.server_gpus:
            variables = EXACT | variables | {"CUDA_VISIBLE_DEVICES": given.vllm_gpu}
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                env=variables,
                cwd=log.parent,  # transformers would take the folder kernels here for a package of that name
                start_new_session=True,
            )

    def wait(self) -> None:
        """Until it answers."""
        wait_for(self._is_healthy, "vLLM is ready", START_SECONDS)

    def ask(self, client: httpx.Client, prompt: str, **more: Any) -> Any:
        """The first choice of an answer. Raises httpx.HTTPError."""
        body = {
            "model": NAME, "messages": [{"role": "user", "content": prompt}], "temperature": 0,
            "max_tokens": self._tokens, "ignore_eos": True, **more,
        }  # fmt: skip
        answer = client.post(f"{self.url}/v1/chat/completions", json=body).raise_for_status().json()
        return answer["choices"][0]

    def text(self, client: httpx.Client, prompt: str) -> str:
        """Of an answer."""
        text: str = self.ask(client, prompt)["message"]["content"]
        return text

    def alone(self, client: httpx.Client, prompt: str) -> Text:
        """An answer with its margin."""
        choice = self.ask(client, prompt, logprobs=True, top_logprobs=2)
        likely = [[top["logprob"] for top in each["top_logprobs"]] for each in choice["logprobs"]["content"]]
        return Text(choice["message"]["content"], min(first - second for first, second in likely))

    def pool_calls(self) -> dict[str, dict[str, float]]:
        """By server and outcome."""
        found: dict[str, dict[str, float]] = {}
        for labels, value in samples(self.url, "expertd_pool_calls_total"):
            if value:
                found.setdefault(labels["server"], {})[labels["outcome"]] = value
        return found

    def is_up(self, server: str) -> bool:
        """Whether it takes a server for one that answers."""
        with suppress(httpx.HTTPError):
            states = samples(self.url, "expertd_pool_servers")
            return any(value and (of["server"], of["state"]) == (server, "up") for of, value in states)
        return False

    def kill(self) -> None:
        """With its children."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _is_healthy(self) -> bool:
        if self._process.poll() is not None:
            raise RuntimeError(f"vLLM: expected it to be ready, got exit code {self._process.returncode}")
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health").is_success
        return False


class VllmSoak(EventSoak):
    """From the start of the servers to their end."""

    _num_shown = 0

    def run(self, given: Given, folder: Path) -> dict[str, Any]:
        """The result."""
        model, servers = folder / NAME, folder / "servers"
        kind = ["--fp8"] if given.server_gpus else []
        subprocess.run([given.python, CHECKPOINTS, model, *kind], check=True, stderr=subprocess.DEVNULL)
        self._add_servers(given, folder, model)
        servers.write_text("\n".join(server.url for server, _ in self.servers))
        vllm = Vllm(given, model, servers, folder / "vllm.log")
        try:
            for server, settings in self.servers:
                server.start(settings)
            vllm.wait()
            texts = known_texts(vllm, given.callers)
            print(f"soak: expected texts:{';'.join(texts.values())}", flush=True)
            self.run_callers([partial(self._ask, vllm, texts)] * given.callers, vllm.is_up)
            return self.result() | {"pool": vllm.pool_calls()}
        except BaseException:
            print((folder / "vllm.log").read_text()[-20000:], file=sys.stderr)
            raise
        finally:
            vllm.kill()
            for server, _ in self.servers:
                server.kill()

    def chosen(self) -> tuple[SoakServer, Any]:
        """The one that computes more now, so that none goes unnoticed."""
        before = [_computed(server) for server, _ in self.servers]
        time.sleep(LOOK_SECONDS)
        more = [_computed(server) - count for (server, _), count in zip(self.servers, before, strict=True)]
        return self.servers[more.index(max(more))]

    def _add_servers(self, given: Given, folder: Path, model: Path) -> None:
        gpus = [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in given.server_gpus]
        for number, variables in enumerate(gpus or [{}, {}]):
            own = folder / str(number)
            own.mkdir()
            server = SoakServer(free_port(), own, given.expertd, **variables)
            settings = Settings.model_validate(
                {
                    "host": "127.0.0.1",
                    "port": server.port,
                    "checkpoints": [{"path": str(model), "layers": "all", "shared_experts": False}],
                    "channels": {"socket": str(own / "channels")},
                }
            )
            self.servers.append((server, settings))

    def _ask(self, vllm: Vllm, texts: Mapping[str, str]) -> None:
        with httpx.Client(timeout=120) as client:
            while not self.is_over:
                prompt, text = random.choice(list(texts.items()))
                self.call(partial(vllm.text, client, prompt), partial(self._is_expected, text))

    def _is_expected(self, expected: str, got: str) -> bool:
        if got != expected and self._num_shown < SHOWN:
            self._num_shown += 1
            print(f"soak: wrong: expected {expected}, got {got}", flush=True)
        return got == expected


def known_texts(vllm: Vllm, callers: int) -> dict[str, str]:
    """A few prompts, with texts of many words that do not depend on what else is in the batch."""
    words = random.Random(0)
    prompts = [
        " ".join(f"w{words.randrange(WORDS)}" for _ in range(words.randint(1, 24))) for _ in range(CANDIDATES)
    ]
    with httpx.Client(timeout=120) as client, ThreadPoolExecutor(callers) as pool:
        alone = {prompt: vllm.alone(client, prompt) for prompt in prompts}
        again = [list(pool.map(partial(vllm.text, client), prompts)) for _ in range(ROUNDS)]
    clear = [
        prompt
        for prompt, *texts in zip(prompts, *again, strict=True)
        if alone[prompt].margin >= MARGIN and set(texts) == {alone[prompt].text}
    ]
    if not clear:
        raise RuntimeError(f"prompts with clear texts: expected some, got none of {len(prompts)}")
    print(f"soak: {len(clear)} of {CANDIDATES} prompts have clear texts", flush=True)
    chosen = sorted(clear, key=lambda prompt: len(set(alone[prompt].text.split())))[-PROMPTS:]
    return {prompt: alone[prompt].text for prompt in chosen}


def samples(url: str, name: str) -> list[tuple[dict[str, str], float]]:
    """Labels and values of a metric of a server."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=30).raise_for_status().text)
    found = [sample for family in families for sample in family.samples if sample.name == name]
    return [(dict(sample.labels), sample.value) for sample in found]


def _computed(server: SoakServer) -> float:
    return sum(value for name in COMPUTED for _, value in samples(server.url, name))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the result."""
    parser = new_parser("tests.soak.vllm", __doc__)
    gpus = min(2, torch.cuda.device_count())
    text = "that has vLLM and expertd-vllm"
    parser.add_argument("--vllm", type=Path, required=True, metavar="PYTHON", help=text)
    expertd = Path(os.environ.get("EXPERTD", EXPERTD))
    parser.add_argument("--expertd", type=Path, default=expertd, metavar="COMMAND")
    parser.add_argument("--transport", default="auto", help="auto, device, channel or http")
    parser.add_argument("--vllm-gpu", default="0", help="its CUDA_VISIBLE_DEVICES")
    parser.add_argument("--server-gpus", default=("", "0,0", "1,0")[gpus], help="those of the servers")
    parser.add_argument("--callers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=40, help="of each answer")
    parser.add_argument("flags", nargs="*", help="more flags of vLLM, behind --")
    given = parser.parse_args(arguments)
    servers = [gpu for gpu in given.server_gpus.split(",") if gpu]
    transport = "device" if servers and given.transport == "auto" else given.transport
    what = Given(
        str(given.vllm.absolute()),
        str(given.expertd.absolute()),
        transport,
        given.vllm_gpu,
        servers,
        given.callers,
        given.tokens,
        given.flags,
    )
    about = {name: value for name, value in what._asdict().items() if name not in ("python", "expertd")}
    about["gpu"] = torch.cuda.get_device_name() if gpus else None
    with tempfile.TemporaryDirectory() as folder:
        soak = VllmSoak(given.seconds, given.every, given.late, given.seed, what.waits)
        return reported(given, partial(soak.run, what, Path(folder)), about)


if __name__ == "__main__":
    sys.exit(main())
