"""Brings answers and reports from the thread of the steps to the event loop."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from expertd.service.engine.steps import Submission
from expertd.service.moe.request import OutputMemory

Completion = tuple[Submission, OutputMemory | Exception]

_MAX_REPORTS = 64  # of steps and answers, that wait for a moment in which they delay nothing
# While the event loop runs Python code, the thread of the steps may wait for it, so it runs few reports in a
# row, unless very many wait, and lets others run in between. It yields equally often whatever the number,
# because it may take 0.2 ms or more to resume.
_REPORTS_IN_A_ROW = 8
_PARTS = 16  # of those that wait, one in a row, if that is more
_PAUSE_SECONDS = 1e-3
_MAX_LEFT = 1024  # reports that are left to the thread of the steps
_reporting_lock = threading.Lock()  # of the thread that runs a report: they share what they count


class Completions:
    """Calls requests' `done` on the event loop, and counts the requests without an answer.

    Reports (metrics) are called on the event loop too, after the answers, or by `report_one`. Safe from any
    thread.

    leaves_reports  whether they are left to `report_one` and `report_until` as long as a thread that calls
                    them is awake
    """

    def __init__(self) -> None:
        self.leaves_reports = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reports: deque[Callable[[], None]] = deque()
        self._reporting = False
        self._unanswered = 0
        self._lock = threading.Lock()
        self._idle = asyncio.Event()
        self._idle.set()

    def start(self) -> None:
        """Use the running event loop from now on."""
        self._loop = asyncio.get_running_loop()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None
        return self._loop

    @property
    def unanswered(self) -> int:
        """The number of accepted requests without an answer."""
        return self._unanswered

    def accepted(self) -> None:
        """A request will be answered."""
        with self._lock:
            self._unanswered += 1

    def answered(self, count: int = 1) -> None:
        """Requests have been answered."""
        with self._lock:
            self._unanswered -= count
        if not self._unanswered and not self._idle.is_set() and self._loop is not None:
            self._loop.call_soon_threadsafe(self._idle.set)

    async def drained(self) -> None:
        """Wait until every accepted request is answered."""
        self._idle.clear()
        while self._unanswered:
            await self._idle.wait()
            self._idle.clear()  # another request may have been accepted since

    def deliver_soon(self, answers: Sequence[Completion]) -> None:
        """Answer requests on the event loop, which is woken once for all of them and for the reports."""
        self.loop.call_soon_threadsafe(self.answer if self.leaves_reports else self.deliver, answers)

    def deliver(self, answers: Sequence[Completion]) -> None:
        """Answer requests, and call what has been reported soon; on the event loop."""
        self.answer(answers)
        self.flush_here()

    def answer(self, answers: Sequence[Completion]) -> None:
        """Answer requests; on the event loop."""
        for submission, answer in answers:
            try:
                submission.take_done()(answer)  # `give_up` is on this thread, too
            except Exception as error:  # the others of the step get their answers
                self._handle("a request could not be answered", error)
        if answers:
            self.answered(len(answers))

    def _report(self) -> None:
        """Begin to run the reports, after the handlers just woken, so that no response waits for metrics."""
        reports = self._reports
        waiting = len(reports)
        row: list[Callable[[], None]] = []
        with suppress(IndexError):  # another thread may take some
            for _ in range(min(waiting, max(_REPORTS_IN_A_ROW, waiting // _PARTS))):
                row.append(reports.popleft())
        self.loop.call_soon(self._run, row)
        self._reporting = bool(reports)
        if self._reporting:  # `reports` may be empty by now
            self.loop.call_later(_PAUSE_SECONDS, self._report)

    def _run(self, reports: Sequence[Callable[[], None]]) -> None:
        between = max(1, len(reports) // _REPORTS_IN_A_ROW)
        for count, report in enumerate(reports, 1):
            with _reporting_lock:
                self._call(report)
            if count % between == 0 and count < len(reports):
                time.sleep(0)  # lets a thread run that waits for the interpreter

    def _call(self, report: Callable[[], None]) -> None:
        try:
            report()
        except Exception as error:
            self._handle("a report failed", error)

    def _handle(self, message: str, error: Exception) -> None:
        what = {"message": message, "exception": error}
        self.loop.call_soon_threadsafe(self.loop.call_exception_handler, what)

    def report_later(self, report: Callable[[], None]) -> None:
        """Call `report` on the event loop, with the next answers or at a `flush`, or in `report_one`."""
        self._reports.append(report)
        if len(self._reports) % (_MAX_LEFT if self.leaves_reports else _MAX_REPORTS) == 0:
            self.flush()

    def report_one(self) -> bool:
        """Call what was reported first; False if there is nothing, or another thread calls something."""
        if not self._reports or not _reporting_lock.acquire(blocking=False):
            return False
        try:
            self._call(self._reports.popleft())
        except IndexError:  # another thread was faster
            return False
        finally:
            _reporting_lock.release()
        return True

    def report_until(self, is_over: Callable[[], bool]) -> None:
        """Call what has been reported until `is_over`; the event loop does if too much is left."""
        while not is_over() and self.report_one():
            pass
        if len(self._reports) > _MAX_REPORTS:
            self.flush()

    @property
    def num_reports(self) -> int:
        """The number of queued reports."""
        return len(self._reports)

    def flush(self) -> None:
        """Call what has been reported soon."""
        if self._reports:
            self.loop.call_soon_threadsafe(self.flush_here)

    def flush_here(self) -> None:
        """`flush`, on the event loop."""
        if not self._reporting:
            self._report()
