"""Infer requests over ASGI, for servers other than ours and for tests: our own connections need no ASGI."""

import asyncio

from starlette.types import Message, Receive, Scope, Send

from expertd.service.http.answers import Answer
from expertd.service.http.bodies import BodyReader, ClientGoneError
from expertd.service.http.endpoint import InferEndpoint
from expertd.service.http.infer import InferCall
from expertd.service.http.infer_ending import InferEnding
from expertd.service.http.infer_head import InferHead

# Requests that wait for less than this get no task that watches for a disconnect.
_WATCH_AFTER_SECONDS = 0.05


class InferRoute:
    """The infer endpoint as an ASGI application."""

    def __init__(self, endpoint: InferEndpoint, bodies: BodyReader) -> None:
        self._endpoint = endpoint
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send, head: InferHead) -> None:
        """Answer one request."""
        caller = _AsgiCaller()
        call = InferCall(self._endpoint, head, caller)
        watch = caller.loop.call_later(_WATCH_AFTER_SECONDS, caller.watch, call, receive)
        if call.admit():
            try:
                content = await self._bodies.read(receive, head.content_length, head.limit)
            except ClientGoneError:
                call.leave()
            except Exception as error:
                call.refuse(error)
            else:
                caller.has_body = True
                call.receive(content)
        try:
            answer = await caller.answer
        except asyncio.CancelledError:
            call.leave()
            raise
        finally:
            watch.cancel()
        if answer is None:
            return
        if caller.has_body and _has_left(receive):
            call.sent(False)
            return
        await _send(send, answer)
        call.sent(True)


class _AsgiCaller:
    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[Answer | None] = self.loop.create_future()
        self.has_body = False  # until then, the messages are the body's

    def reply(self, call: InferEnding, answer: Answer | None) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)

    def watch(self, call: InferCall, receive: Receive) -> None:
        """Leave as soon as the client disconnects."""

        async def watching() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            call.leave()

        if self.has_body and not self.answer.done():
            task = self.loop.create_task(watching())
            self.answer.add_done_callback(lambda _: task.cancel())


async def _send(send: Send, answer: Answer) -> None:
    lines = answer.fields.split(b"\r\n")[:-1]
    headers = [(name, value) for name, _, value in (line.partition(b": ") for line in lines)]
    if answer.close:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    for index, part in enumerate(answer.parts, 1):
        message: Message = {
            "type": "http.response.body",
            "body": bytes(part),
            "more_body": index < len(answer.parts),
        }
        await send(message)


def _has_left(receive: Receive) -> bool:
    """Whether the client has disconnected, as far as is known without waiting."""
    receiving = receive().__await__()
    try:
        next(receiving)
    except StopIteration as stop:
        return bool(stop.value["type"] == "http.disconnect")
    receiving.close()  # it would block
    return False
