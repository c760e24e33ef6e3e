"""The struct that a grouped GEMM is launched with: host and device agree on every field."""

from collections.abc import Iterator
from ctypes import Structure, sizeof

import pytest

from expertd.kernels.backends.hopper import parameters, tiles
from expertd.kernels.backends.hopper.grouped_gemm import VARIANTS
from expertd.kernels.backends.hopper.tiles import TileConfig
from expertd.layout import Layout
from tests.kernels.front_end import errors_of

OFFSET = "__INTADDR__(&((Parameters*)0)->{})"  # NVRTC's compiler has no offsetof without a header


def fields(struct: type[Structure], prefix: str = "", start: int = 0) -> Iterator[tuple[str, int, int]]:
    """(name, offset, bytes) of all fields, those of structs within it included."""
    for name, kind, *_ in struct._fields_:
        if name == "padding":
            continue
        offset = start + getattr(struct, name).offset
        yield prefix + name, offset, sizeof(kind)
        if issubclass(kind, Structure):
            yield from fields(kind, f"{prefix}{name}.", offset)


@pytest.mark.parametrize(
    ("config", "output"),
    [
        (tiles.NORMAL, parameters.Bf16Output),
        (tiles.SWAP_AB, parameters.Bf16Output),
        (tiles.SWIGLU, parameters.SwigluOutput),
        (tiles.GLU, parameters.OtherGluOutput),
    ],
    ids=["bf16", "swap_ab", "swiglu", "glu"],
)
def test_host_and_device_agree_on_the_parameters(config: TileConfig, output: type[parameters.Output]) -> None:
    struct = parameters.PARAMETERS[output]
    listed = list(fields(struct))
    checks = [f"static_assert(sizeof(Parameters) == {sizeof(struct)});"]
    for name, offset, size in listed:
        checks.append(f'static_assert({OFFSET.format(name)} == {offset}, "{name}");')
        checks.append(f'static_assert(sizeof(((Parameters*)0)->{name}) == {size}, "{name}");')
    source = VARIANTS[Layout.CONTIGUOUS, config].source
    end = 'static_assert(false, "the end");'
    assert errors_of(source, "\n".join([*checks, end])) == ['static assertion failed with "the end"']
    wrong = f"static_assert({OFFSET.format('tile_counter')} == {listed[-1][1] + 8});"
    assert errors_of(source, wrong) == ["static assertion failed"]
