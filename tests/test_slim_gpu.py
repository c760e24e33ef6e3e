"""On a GPU, too, a server opens nothing that deploy/slim.py removes from an image."""

from pathlib import Path

import numpy
import pytest
import tritonclient.http as triton

from deploy import slim
from tests.service.processes import serving

pytestmark = pytest.mark.gpu

_IF_PRESENT = "nvidia/cu13/lib/libcusolver"  # opened with torch, which starts without it as well
PACKAGES = Path(numpy.__file__).parents[1]
_CONFIG = """
backend: hopper
partitions: {half: 64}
models:
  - {name: graphs, hidden_size: 512, intermediate_size: 256, num_experts: 16, top_k: 4, partition: half}
"""


def test_a_server_on_a_gpu_maps_nothing_that_is_removed(tmp_path: Path) -> None:
    config = tmp_path / "settings.yaml"
    config.write_text(_CONFIG)
    with (
        serving(["--config", config], tmp_path) as server,
        triton.InferenceServerClient(server.url) as client,
    ):
        for tokens in (1, 300):
            tensor = triton.InferInput("hidden_states", [tokens, 512], "FP32")
            tensor.set_data_from_numpy(numpy.ones((tokens, 512), numpy.float32))
            assert client.infer("graphs", [tensor]).as_numpy("hidden_states").shape == (tokens, 512)
        maps = Path(f"/proc/{server.process.pid}/maps").read_text().splitlines()
    files = {Path(line.split(maxsplit=5)[5]) for line in maps if line.count("/") > 1}
    below = [str(path.relative_to(PACKAGES)) for path in files if path.is_relative_to(PACKAGES)]
    assert any("libtorch_cuda.so" in name for name in below)
    opened = [name for name in below if slim.is_unused(name) and not name.startswith(_IF_PRESENT)]
    assert {Path(name).name for name in opened} <= slim.needed_libraries(PACKAGES)
