"""An application that serves from a thread of its own, for tests that drive a browser on theirs."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from expertd.service.engine.loading import Loader
from expertd.service.settings.model import Settings
from tests.service.apps import serving


@contextmanager
def serving_in_thread(settings: Settings, loader: Loader) -> Iterator[str]:
    """The address of a running application."""
    begun, ports = threading.Event(), []
    loop = asyncio.new_event_loop()
    end = asyncio.Event()

    async def serve() -> None:
        async with serving(settings, loader) as server:
            ports.append(server.port)
            begun.set()
            await end.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert begun.wait(30)
        yield f"http://127.0.0.1:{ports[0]}/"
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()
        loop.close()
