"""Memory that calls share, in places of equal size, replaced by larger memory when calls need it."""

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

from expertd_client.channel.layout import aligned
from expertd_client.errors import DeadlineError, ExpertError, ServerBusyError, TransportUnavailableError
from expertd_client.transport import NotThisCallError

_PLACE_ALIGNMENT = 4096
_MIN_BYTES = 64 << 10  # of a place: callers' sizes vary
_MIN_TOKENS = 16
_MIN_PLACES = 2
_MANY_BYTES = 128 << 20  # of an arena: beyond, it has only as many places as it must
_PAUSE_SECONDS = 5.0  # after a refusal by the server
_MORE_PLACES_SECONDS = 30.0  # after a refusal of places that calls can do without
_BUSY_SECONDS = 0.25  # if that may be over soon, as while it loads


class Need(NamedTuple):
    """What a call needs of its place."""

    tokens: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of an arena."""

    max_tokens: int
    place_bytes: int
    num_places: int

    def hold(self, need: Need) -> bool:
        """Whether a place is large enough for a call."""
        return need.tokens <= self.max_tokens and need.num_bytes <= self.place_bytes

    @property
    def num_bytes(self) -> int:
        """The bytes of all places."""
        return self.place_bytes * self.num_places


def min_sizes(need: Need, num_places: int = 1) -> Sizes:
    """For so many calls at a time, of exactly this size."""
    return Sizes(max(1, need.tokens), aligned(max(1, need.num_bytes), _PLACE_ALIGNMENT), num_places)


class ArenaOpening(NamedTuple):
    """An arena that a call must open, of the first of `sizes` that the server does not refuse."""

    sizes: tuple[Sizes, ...]
    is_needed: bool = True  # False: the current one would do, with more waiting


class CallArena(ABC):
    """Places that calls take in turn. `Holder` guards all of its attributes and calls all of its methods."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.free = list(range(sizes.num_places))  # the last used is taken first: it is in the caches
        self.users = 0
        self.retired = False  # takes no more calls, and is closed after the last of them

    @abstractmethod
    def is_usable(self) -> bool:
        """Whether the server still has it."""

    @abstractmethod
    def abandon(self, place: int, request: int) -> None:
        """The caller at a place has gone, but the server may still work on its request."""

    def reclaim(self) -> bool:
        """Make places free whose calls ended early, once the server is done; False if it is not with some."""
        return True

    @abstractmethod
    def break_off(self) -> None:
        """Have it be unusable, and calls that wait find that out."""

    @abstractmethod
    def close(self) -> None:
        """Give it up; no call uses it."""


A = TypeVar("A", bound=CallArena)


@dataclass(slots=True)
class Lease(Generic[A]):
    """A place of an arena, taken for a call."""

    arena: A
    place: int


class Later(NamedTuple):
    """No place is free: try again when woken, or after `seconds` (None: not before)."""

    seconds: float | None


class Holder(Generic[A]):
    """The arena of calls of one kind. Never waits; safe from any thread."""

    def __init__(self, max_places: int) -> None:
        self._max_places = max_places
        self._granted: tuple[int, float] | None = None  # the most places for a while, and until when
        self._lock = threading.Lock()
        self._arena: A | None = None
        self._opening: ArenaOpening | None = None
        self._closed = False
        self._callers = 0
        self._waiting: deque[Callable[[], None]] = deque()
        self._refusal: tuple[Sizes, ExpertError, float] | None = None

    def enter(self) -> None:
        """A call begins: it needs a place until `leave`."""
        with self._lock:
            self._callers += 1

    def leave(self) -> None:
        """A call has ended."""
        with self._lock:
            self._callers -= 1

    def take(self, need: Need, wake: Callable[[], None]) -> Lease[A] | ArenaOpening | Later:
        """A place; or an arena that the caller must open; or Later, and `wake` is called.

        Raises NotThisCallError for a while after a server has refused such an arena, and
        TransportUnavailableError once closed.
        """
        with self._lock:
            if self._closed:
                raise TransportUnavailableError("transport: expected an open one, got a closed one")
            arena = self._arena
            if arena is not None and not arena.is_usable():
                self._retire(arena)
                arena = self._arena
            fits = arena is not None and arena.sizes.hold(need)
            all_known = True
            if arena is not None and fits:
                all_known = arena.reclaim()
                if arena.free:
                    arena.users += 1
                    return Lease(arena, arena.free.pop())
            is_full = arena is not None and fits and not self._may_have_more(arena.sizes)
            if self._opening is not None or is_full:
                self._waiting.append(wake)
                return Later(None if all_known else 0.005)
            if not fits:
                self._check_refusal(need)
            old = arena.sizes if arena is not None else None
            self._opening = _opening(need, self._larger(need, old), old)
            return self._opening

    def forget(self, wake: Callable[[], None]) -> None:
        """A caller that got Later does not wait any more."""
        with self._lock:
            try:
                self._waiting.remove(wake)
            except ValueError:  # it was woken, instead of another one
                self._wake_one()

    def opened(self, arena: A) -> None:
        """Use this arena instead of the one before, which `take` asked for."""
        with self._lock:
            asked, self._opening, self._refusal = self._opening, None, None
            if self._arena is not None:
                self._retire(self._arena)
            self._arena = arena
            if asked is not None and arena.sizes.num_places < asked.sizes[0].num_places:
                self._have_no_more()
            if self._closed:
                self._retire(arena)
            self._wake_all()

    def failed(self, need: Need, error: ExpertError | None) -> None:
        """No arena was opened, because of `error`; None: for the call's own reason."""
        with self._lock:
            asked, self._opening = self._opening, None
            self._wake_all()
            if error is None:
                return
            if asked is not None and not asked.is_needed:
                self._have_no_more(error)
            else:
                self._refusal = min_sizes(need), error, time.monotonic() + _pause(error)

    def give_back(self, lease: Lease[A], unanswered: int | None = None) -> None:
        """End the use of a place. `unanswered`: the request there, if it has no answer."""
        arena = lease.arena
        with self._lock:
            arena.users -= 1
            if unanswered is None:
                arena.free.append(lease.place)
            else:
                arena.abandon(lease.place, unanswered)
            if arena.retired and not arena.users:
                arena.close()
            # Of several, each must look for an answer that is to come, as one may give up before it is there;
            # and while a larger arena is being opened, the first may need it, and another one not.
            if unanswered is None and self._opening is None:
                self._wake_one()
            else:
                self._wake_all()

    def reclaim(self, arena: A) -> bool:
        """Have an arena that a call uses make places free, as `take` does; it may be retired.

        False if the server does not have it any more.
        """
        with self._lock:
            arena.reclaim()
            self._wake_all()
            return arena.is_usable()

    def break_off(self) -> None:
        """Have calls that wait for answers fail."""
        with self._lock:
            if self._arena is not None:
                self._arena.break_off()

    def wake(self) -> None:
        """Places may have become free, or the arena unusable."""
        with self._lock:
            self._wake_all()

    def close(self) -> None:
        """Close the arena now, or after the last call that uses it."""
        with self._lock:
            self._closed = True
            if self._arena is not None:
                self._retire(self._arena)
            self._wake_all()

    def _retire(self, arena: A) -> None:
        arena.retired = True
        self._granted = None
        if self._arena is arena:
            self._arena = None
        if not arena.users:
            arena.close()

    def _have_no_more(self, error: ExpertError | None = None) -> None:
        """The server gives no more places, for now: calls wait for those that there are."""
        may_end_soon = isinstance(error, ServerBusyError | DeadlineError)
        seconds = _PAUSE_SECONDS if may_end_soon else _MORE_PLACES_SECONDS
        if self._arena is not None:
            self._granted = self._arena.sizes.num_places, time.monotonic() + seconds

    def _may_have_more(self, sizes: Sizes) -> bool:
        return self._callers > sizes.num_places and sizes.num_places < self._place_limit(sizes.place_bytes)

    def _place_limit(self, place_bytes: int) -> int:
        places = min(self._max_places, max(_MIN_PLACES, _MANY_BYTES // place_bytes))
        if self._granted is not None and time.monotonic() < self._granted[1]:
            return min(places, self._granted[0])
        return places

    def _larger(self, need: Need, old: Sizes | None) -> Sizes:
        """Powers of two, so that it is replaced few times, and places never smaller than before."""
        places = max(_MIN_PLACES, _power(self._callers))
        if old is not None and old.hold(need):
            return replace(old, num_places=min(places, self._place_limit(old.place_bytes)))
        tokens = max(_MIN_TOKENS, _power(need.tokens), old.max_tokens if old else 0)
        num_bytes = max(need.num_bytes * tokens // max(1, need.tokens), old.place_bytes if old else 0)
        place_bytes = aligned(max(_MIN_BYTES, num_bytes), _PLACE_ALIGNMENT)
        return Sizes(tokens, place_bytes, min(places, self._place_limit(place_bytes)))

    def _check_refusal(self, need: Need) -> None:
        if self._refusal is None:
            return
        sizes, error, until = self._refusal
        if time.monotonic() >= until:
            self._refusal = None
        elif need.tokens >= sizes.max_tokens or need.num_bytes > sizes.place_bytes - _PLACE_ALIGNMENT:
            raise NotThisCallError(error)

    def _wake_one(self) -> None:
        if self._waiting:
            self._waiting.popleft()()

    def _wake_all(self) -> None:
        while self._waiting:
            self._waiting.popleft()()


def _pause(error: ExpertError) -> float:
    """Seconds until a server that has refused an arena is asked again."""
    if not isinstance(error, ServerBusyError):
        return _PAUSE_SECONDS
    return min(_PAUSE_SECONDS, error.retry_after or _BUSY_SECONDS)


def _opening(need: Need, sizes: Sizes, old: Sizes | None) -> ArenaOpening:
    """One of `sizes`, or else with fewer and fewer places, each as large as the call needs.

    They are never smaller than those of the current arena, `old`, nor fewer, unless `sizes` has fewer.
    """
    is_needed = old is None or not old.hold(need)
    if old is None:
        old = Sizes(0, 0, 1)
    halves = [sizes.num_places >> shift for shift in range(sizes.num_places.bit_length())]
    more = [number for number in halves if number > old.num_places]
    if not is_needed:
        return ArenaOpening(tuple(replace(sizes, num_places=number) for number in more), is_needed)
    exact = Need(max(need.tokens, old.max_tokens), max(need.num_bytes, old.place_bytes))
    numbers = [*more, min(sizes.num_places, old.num_places)]
    tries = dict.fromkeys([sizes, *(min_sizes(exact, number) for number in numbers)])
    return ArenaOpening(tuple(tries), is_needed)


def _power(number: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << max(0, number - 1).bit_length()
