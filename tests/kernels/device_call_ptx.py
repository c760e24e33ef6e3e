"""The PTX of the client's kernels: `python -m tests.kernels.device_call_ptx` compiles it anew."""

import re

from cuda.bindings import nvrtc

from tests.paths import ROOT

SOURCE = ROOT / "client/src/expertd_client/channel/device_call.cu"
PTX = SOURCE.with_suffix(".ptx")
_OPTIONS = [b"--gpu-architecture=compute_80", b"--std=c++17"]


def compiled() -> bytes:
    """For every GPU from sm_80 on, and drivers from CUDA 11 on, by the NVRTC that is installed."""
    _, program = nvrtc.nvrtcCreateProgram(SOURCE.read_bytes(), SOURCE.name.encode(), 0, [], [])
    (status,) = nvrtc.nvrtcCompileProgram(program, len(_OPTIONS), _OPTIONS)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytearray(size)
    nvrtc.nvrtcGetProgramLog(program, log)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(log.decode())
    _, size = nvrtc.nvrtcGetPTXSize(program)
    ptx = bytearray(size)
    nvrtc.nvrtcGetPTX(program, ptx)
    lines = bytes(ptx).rstrip(b"\0").splitlines(keepends=True)
    # Nothing needs more than an old driver has, but for hints.
    text = b"".join(line for line in lines if b"used_bytes_mask" not in line)
    return re.sub(rb"\.version \S+", b".version 7.0", text)


if __name__ == "__main__":
    PTX.write_bytes(compiled())
