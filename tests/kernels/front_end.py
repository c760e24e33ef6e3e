"""What NVRTC's front end says of a kernel: it stops at the first errors, long before it makes code."""

import re

import pytest

from expertd.kernels import jit


def errors_of(source: jit.Source, text: str) -> list[str]:
    """The errors of a source with `text` at its end, which must have some."""
    with pytest.raises(jit.CompileError) as caught:
        jit.compile_source(source, source.text() + text)
    return re.findall(r"\berror: (.*)", str(caught.value))
