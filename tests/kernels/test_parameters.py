"""The struct that a grouped GEMM is launched with: host and device agree on every field."""

from ctypes import Structure, sizeof
from operator import attrgetter
from typing import Any

import pytest

from expertd.kernels.backends.hopper import parameters, tiles
from expertd.kernels.backends.hopper.grouped_gemm import VARIANTS
from expertd.kernels.backends.hopper.parameters import PACKERS, PARAMETERS, leaves
from expertd.kernels.backends.hopper.tiles import TileConfig
from expertd.layout import Layout
from tests.kernels.front_end import errors_of

OFFSET = "__INTADDR__(&((Parameters*)0)->{})"  # NVRTC's compiler has no offsetof without a header
EPILOGUES = tiles.NORMAL, tiles.SWAP_AB, tiles.SWIGLU, tiles.GLU, tiles.MXFP4_SWIGLU, tiles.MXFP4_GLU
CONFIGS = {config.epilogue: config for config in EPILOGUES}


def test_every_epilogue_has_a_struct() -> None:
    assert CONFIGS.keys() == PARAMETERS.keys() == {config.epilogue for _, config in VARIANTS}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_host_and_device_agree_on_the_parameters(config: TileConfig) -> None:
    struct = PARAMETERS[config.epilogue]
    listed = list(leaves(struct))
    checks = [f"static_assert(sizeof(Parameters) == {sizeof(struct)});"]
    for name, kind, offset in listed:
        checks.append(f'static_assert({OFFSET.format(name)} == {offset}, "{name}");')
        checks.append(f'static_assert(sizeof(((Parameters*)0)->{name}) == {sizeof(kind)}, "{name}");')
    source = VARIANTS[Layout.CONTIGUOUS, config].source
    end = 'static_assert(false, "the end");'
    assert errors_of(source, "\n".join([*checks, end])) == ['static assertion failed with "the end"']
    wrong = f"static_assert({OFFSET.format('tile_counter')} == {listed[-1][2] + 8});"
    assert errors_of(source, wrong) == ["static assertion failed"]


@pytest.mark.parametrize("epilogue", PARAMETERS)
def test_packed_values_are_the_fields(epilogue: str) -> None:
    def value(kind: type, number: int) -> Any:
        return bytes([number]) * 128 if kind is parameters.TensorMapWords else number

    def read(struct: Structure, name: str) -> Any:
        found = attrgetter(name)(struct)
        return bytes(found) if isinstance(found, parameters.TensorMapWords) else found

    listed = list(leaves(PARAMETERS[epilogue]))
    given = [value(kind, number) for number, (_, kind, _) in enumerate(listed, start=1)]
    packed = PACKERS[epilogue].pack(*given)
    struct = PARAMETERS[epilogue].from_buffer_copy(packed)
    assert len(packed) == sizeof(struct)
    assert [read(struct, name) for name, _, _ in listed] == given
