"""Requests that wait, by caller: deficit round robin in tokens."""

import math
from collections import deque
from collections.abc import Collection
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    """A request of `caller`, with `left` tokens that it waits for."""

    @property
    def caller(self) -> int: ...
    @property
    def left(self) -> int: ...


T = TypeVar("T", bound=Waiting)


class _Caller(Generic[T]):
    __slots__ = ("credit", "num_tokens", "number", "waiting")

    def __init__(self, number: int, credit: int) -> None:
        self.number = number
        self.credit = credit  # tokens that it may have in this round; its last request may exceed them
        self.waiting: deque[T] = deque()
        self.num_tokens = 0  # that wait


class FairQueue(Generic[T]):
    """Requests of one priority and one kind. Each caller's come in their order, and callers take turns.

    A caller whose credit is used up waits until no other one has both requests and credit; then a round
    begins, and gives everybody `quantum` tokens, at least as many as a request has. Debts remain.
    """

    __slots__ = ("_callers", "_quantum", "_ready", "_spent", "num_requests")

    def __init__(self, quantum: int) -> None:
        self.num_requests = 0
        self._quantum = quantum
        self._callers: dict[int, _Caller[T]] = {}  # all that are not as a new one would be
        self._ready: deque[_Caller[T]] = deque()  # with requests and credit; the first one has its turn
        self._spent: deque[_Caller[T]] = deque()  # with requests, and without credit

    def put(self, submission: T) -> None:
        """Let a request wait behind its caller's others."""
        caller = self._callers.get(submission.caller)
        if caller is None:
            caller = self._callers[submission.caller] = _Caller(submission.caller, self._quantum)
        if not caller.waiting:
            (self._ready if caller.credit > 0 else self._spent).append(caller)
        caller.waiting.append(submission)
        caller.num_tokens += submission.left
        self.num_requests += 1

    def head(self) -> T:
        """The next request; there must be one."""
        if not self._ready:
            self._begin_round()
        return self._ready[0].waiting[0]

    def bring_forward(self, others: Collection[int]) -> bool:
        """Make the first caller in turn that is not among `others` the next one; False if there is none."""
        for callers in (self._ready, self._spent):
            for caller in callers:
                if caller.number not in others:
                    callers.remove(caller)
                    self._ready.appendleft(caller)
                    return True
        return False

    def take(self, num_tokens: int) -> None:
        """Give `num_tokens` of `head` to a step; `head` leaves once it has none left."""
        caller = self._ready[0]
        ends = caller.waiting[0].left == num_tokens
        if ends:
            caller.waiting.popleft()
        self._gave(caller, num_tokens, int(ends))

    def take_whole(self, room: int, at_least_one: bool) -> tuple[list[T], int]:
        """Give a step all requests in turn, up to one that does not fit into its `room`; and the room left.

        at_least_one  whether the first one is given even if it does not fit
        """
        taken: list[T] = []
        fits = True
        while fits and self.num_requests:
            if not self._ready:
                self._begin_round()
            caller = self._ready[0]
            waiting, before, begin = caller.waiting, room, len(taken)
            max_tokens = (
                caller.credit if len(self._ready) == 1 else 1
            )  # others have their turn after one request
            while waiting and (room == before or before - room < max_tokens):
                left = waiting[0].left
                fits = left <= room or (at_least_one and not taken)
                if not fits:
                    break
                taken.append(waiting.popleft())
                room -= left
            if len(taken) > begin:
                self._gave(caller, before - room, len(taken) - begin)
        return taken, room

    def _gave(self, caller: _Caller[T], num_tokens: int, num_requests: int) -> None:
        """Count what a step was given of the caller whose turn it is, and whose turn is next.

        num_requests  that have left
        """
        ready = self._ready
        caller.credit -= num_tokens
        caller.num_tokens -= num_tokens
        self.num_requests -= num_requests
        if not caller.waiting:
            ready.popleft()
        elif caller.credit <= 0:
            self._spent.append(ready.popleft())
        elif num_requests and len(ready) > 1:
            ready.rotate(-1)

    def remove(self, submission: T) -> None:
        """Forget a request that waits."""
        caller = self._callers[submission.caller]
        caller.waiting.remove(submission)
        caller.num_tokens -= submission.left
        self.num_requests -= 1
        if not caller.waiting:
            (self._ready if caller in self._ready else self._spent).remove(caller)

    def has(self, caller: int) -> bool:
        """Whether a request of `caller` waits."""
        found = self._callers.get(caller)
        return found is not None and bool(found.waiting)

    @property
    def num_tokens(self) -> int:
        """The waiting tokens of all requests."""
        return sum(caller.num_tokens for caller in self._callers.values())

    def tokens_before(self, number: int) -> int:
        """About how many tokens are computed before a new request of a caller."""
        own = self._callers.get(number)
        if own is None:
            own = _Caller(number, self._quantum)
        has_turns = own.credit > own.num_tokens  # else others use up theirs before its next round
        tokens = own.num_tokens
        for caller in self._callers.values():
            if caller is own or not caller.waiting:
                continue
            max_tokens = self._quantum + own.num_tokens
            if has_turns:  # a request for each of its own, and one before the new one
                requests = min(len(own.waiting) + 1, len(caller.waiting))
                max_tokens = min(max_tokens, math.ceil(caller.num_tokens * requests / len(caller.waiting)))
            tokens += min(caller.num_tokens, max_tokens)
        return tokens

    def all(self) -> list[T]:
        """The requests that wait."""
        return [submission for caller in self._callers.values() for submission in caller.waiting]

    def _begin_round(self) -> None:
        for caller in list(self._callers.values()):
            caller.credit = min(caller.credit + self._quantum, self._quantum)
            if caller.credit == self._quantum and not caller.waiting:
                del self._callers[caller.number]
        self._ready, self._spent = self._spent, self._ready
