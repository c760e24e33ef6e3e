"""How a caller of a layer learns when each of its stages ends."""

from typing import Protocol


class Stages(Protocol):
    """Notified of a call's stages. A stage lasts from the end of the one before to its own."""

    def mark(self, stage: str) -> None:
        """All of `stage` is on the current stream, and nothing of the next one; on a CPU, it is done.

        Must not wait for the device.
        """
