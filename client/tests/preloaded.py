"""What a server imports, for processes that are forked from one that has imported this."""

import gc
from importlib import import_module

for name in ("cli", "commands.serve", "http.server", "engine.loading"):
    import_module(f"expertd.service.{name}")
gc.freeze()  # as if it had been there before the fork: the collector never searches it
