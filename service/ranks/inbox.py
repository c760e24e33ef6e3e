"""How ranks reach the process that has started them: by messages over sockets, and by a bell for steps."""

import select
import threading
from collections.abc import Callable, Sequence

from expertd.service.ranks.rank import Rank
from expertd.service.ranks.ring import Bell


class Inbox:
    """What all ranks of a process have in common, also those that start later.

    bell     rung at the end of a rank's step
    putting  all ranks get commands in one order
    changed  notified when a rank has said something
    """

    def __init__(self) -> None:
        self.bell = Bell()
        self.putting = threading.Lock()
        self.changed = threading.Condition()
        self._woken = Bell()

    def take(self, ranks: Sequence[Rank], seconds: float) -> str | None:
        """Receive what ranks send within `seconds`; why one is lost, or None.

        For one thread at a time. Ends early after `wake`.
        """
        found = [rank.hear() for rank in self._readable(ranks, seconds)]
        if found:
            with self.changed:
                self.changed.notify_all()
        return next((why for why in found if why is not None), None)

    def has_news(self, ranks: Sequence[Rank]) -> bool:
        """Whether `take` would return at once."""
        return bool(self._readable(ranks, 0))

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait on another thread than that of `take` until what ranks send makes it hold; whether it does."""
        with self.changed:
            return self.changed.wait_for(condition, seconds)

    def wake(self) -> None:
        """End `take`, and have conditions checked."""
        with self.changed:
            self.changed.notify_all()
        self._woken.ring()

    def _readable(self, ranks: Sequence[Rank], seconds: float) -> list[Rank]:
        """The ranks that have sent something or ended, once there are any."""
        poll = select.poll()
        by_descriptor = {rank.connection.fileno(): rank for rank in ranks}
        for descriptor in (*by_descriptor, self._woken.descriptor):
            poll.register(descriptor, select.POLLIN)
        found = [descriptor for descriptor, _ in poll.poll(1000 * seconds)]
        if self._woken.descriptor in found:
            self._woken.clear()
        return [by_descriptor[descriptor] for descriptor in found if descriptor in by_descriptor]
