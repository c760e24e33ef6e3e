"""The context that makes a stream the current one does what torch's own does."""

import pytest
import torch

from expertd.kernels.partitions import SMPartitions
from expertd.service.device import device_of

pytestmark = pytest.mark.gpu


def test_a_stream_is_the_current_one_inside() -> None:
    partitions = SMPartitions(0)
    partitions.apply({"a": 16})
    before = torch.cuda.current_stream()
    outer, inner = torch.cuda.Stream(), partitions.stream("a")  # type: ignore[no-untyped-call]
    with device_of("cuda").steps_on(outer):
        assert torch.cuda.current_stream() == outer
        with device_of("cuda").steps_on(inner):
            assert torch.cuda.current_stream() == inner
        assert torch.cuda.current_stream() == outer
    assert torch.cuda.current_stream() == before


def test_an_error_ends_it() -> None:
    before = torch.cuda.current_stream()
    with pytest.raises(RuntimeError, match="step"), device_of("cuda").steps_on(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        raise RuntimeError("step")
    assert torch.cuda.current_stream() == before
