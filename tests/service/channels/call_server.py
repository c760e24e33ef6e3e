"""A server of device calls, a process on the first GPU, and what callers on the last one need."""

import signal
import subprocess
import sys
from pathlib import Path

import httpx
import torch
from torch import Tensor

from expertd_client import ExpertClient
from tests.service.sockets import free_port
from tests.service.waiting import wait_for
from tests.soak.server import is_ready

H, EXPERTS, TOP_K, LAYERS = 1024, 16, 4, 3
NAMES = [f"tiny.layers.{number}" for number in range(LAYERS)]
CONFIG = """
host: 127.0.0.1
backend: hopper
models: [{models}]
channels: {{socket: {folder}/channels}}
"""
MODEL = "{{name: {name}, hidden_size: 1024, intermediate_size: 512, num_experts: 16, top_k: 4}}"
CALLER = torch.device("cuda", torch.cuda.device_count() - 1 if torch.cuda.is_available() else 0)


class Server:
    """The process; `with` waits until it is ready. settings: further lines of its file."""

    def __init__(self, folder: Path, port: int | None = None, settings: str = "") -> None:
        config = folder / "expertd.yaml"
        models = ", ".join(MODEL.format(name=name) for name in NAMES)
        config.write_text(CONFIG.format(models=models, folder=folder) + settings)
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-c", "import sys; from expertd.service.cli import main; sys.exit(main())"]
        self.process = subprocess.Popen([*command, "serve", "--config", config, "--port", str(self.port)])

    def is_ready(self) -> bool:
        """Whether it says so."""
        assert self.process.poll() is None, f"the server has ended with {self.process.returncode}"
        return is_ready(self.port)

    def metrics(self) -> str:
        """The text of /metrics."""
        return httpx.get(f"{self.url}/metrics", timeout=60, verify=False).raise_for_status().text

    def kill(self) -> None:
        """Send SIGKILL."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Send SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0

    def __enter__(self) -> "Server":
        try:
            wait_for(self.is_ready, "the server is ready", 120)
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def inputs(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random hidden_states, topk_ids and topk_weights of `count` tokens."""
    x = torch.randn(count, H, device=CALLER).bfloat16()
    ids = torch.rand(count, EXPERTS, device=CALLER).argsort(1)[:, :TOP_K].int()
    return x, ids, torch.rand(count, TOP_K, device=CALLER)


def expected(client: ExpertClient, model: str, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """By an HTTP request."""
    x, ids, weights = (tensor.cpu() for tensor in given)
    out = client.infer(model, x, ids, weights)
    assert isinstance(out, Tensor)
    return out.to(CALLER)


def endless_caller(url: str) -> "subprocess.Popen[str]":
    """A process that makes calls until it is killed, and prints `called` after the first ones."""
    program = f"""
import torch
from expertd_client import ExpertClient
client = ExpertClient({url!r})
channel = client.open_device_channel({NAMES!r}, device="cuda:{CALLER.index}")
x = torch.zeros(3, {H}, dtype=torch.bfloat16, device="cuda:{CALLER.index}")
ids = torch.zeros(3, {TOP_K}, dtype=torch.int32, device=x.device)
for _ in range(5):
    channel.call(x, ids, ids.float(), model={NAMES[0]!r})
torch.cuda.synchronize()
print("called", flush=True)
while True:
    channel.call(x, ids, ids.float(), model={NAMES[0]!r})
"""
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
