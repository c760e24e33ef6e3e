"""What a server imports, for processes that are forked from one that has imported this."""

import gc
from importlib import import_module

for name in (
    "expertd.kernels.backends.reference.backend",
    "expertd.service.cli",
    "expertd.service.commands.serve",
    "expertd.service.engine.loading",
    "expertd.service.http.server",
    "expertd.service.ranks.front.staging",
    "fastapi_offline",
    "pydantic.v1",
    "uvloop",
):
    import_module(name)
import_module("expertd.kernels.backends.cpu").why_not(None)  # imports LLVM if there is one
gc.freeze()  # as if it had been there before the fork: the collector never searches it
