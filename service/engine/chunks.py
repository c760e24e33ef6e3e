"""Parts of requests: a long one can be computed in several steps, and is answered once."""

from collections.abc import Sequence
from dataclasses import replace

from expertd.service.engine.steps import Chunk, State, Submission
from expertd.service.memory import Buffer, Span, host_view
from expertd.service.moe.request import LayerRequest, OutputMemory

_STEP = 64  # tokens: chunks other than the last one are multiples, if they are that large


def chunk_size(num_tokens: int, max_tokens: int) -> int:
    """The tokens of the next chunk of `num_tokens`, in equal chunks of at most `max_tokens`."""
    count = -(-num_tokens // max_tokens)
    size = -(-num_tokens // count)
    return min(-(-size // _STEP) * _STEP, max_tokens, num_tokens)


def begin_chunk(submission: Submission, num_tokens: int) -> Chunk:
    """The next tokens of a long request, for a step; the rest still waits."""
    start = submission.begun
    submission.begun += num_tokens
    if submission.begun == submission.request.num_tokens:
        submission.state = State.STARTED
    submission.running += 1
    whole = num_tokens == submission.request.num_tokens
    request = submission.request if whole else part_of(submission.request, start, num_tokens)
    return Chunk(submission, request, start)


def begin_rest(waiting: Sequence[Submission]) -> list[Chunk]:
    """What no step has been given of these requests: all of them, but for long ones."""
    chunks: list[Chunk] = []
    for submission in waiting:
        if submission.is_long:
            chunks.append(begin_chunk(submission, submission.left))
            continue
        request = submission.request
        submission.begun, submission.state = request.num_tokens, State.STARTED
        chunks.append(Chunk(submission, request))
    return chunks


def end_chunk(chunk: Chunk, answer: OutputMemory | Exception) -> OutputMemory | Exception | None:
    """What a long request is answered with, after its step; None: not yet, because it is not done.

    Its state is CANCELLED if the rest must not be computed. For the holder of the queues' lock.
    """
    submission = chunk.submission
    submission.running -= 1
    if isinstance(answer, Exception):
        submission.error = submission.error or answer
    elif chunk.request is submission.request:
        return answer
    elif submission.request.output is None:
        submission.outputs = submission.outputs or {}
        submission.outputs[chunk.start] = answer
    if submission.running or (submission.error is None and submission.state is State.WAITING):
        return None
    return submission.error or submission.request.output or _joined(submission)


def part_of(request: LayerRequest, start: int, num_tokens: int) -> LayerRequest:
    """The rows of some tokens, in place; the device does not announce their output, which is not all."""

    def rows(memory: Buffer | Span) -> Buffer | Span:
        num_bytes = memory.num_bytes if isinstance(memory, Span) else memoryview(memory).nbytes
        size = num_bytes // request.num_tokens
        if isinstance(memory, Span):
            return memory.part(start * size, num_tokens * size)
        return memoryview(memory).cast("B")[start * size : (start + num_tokens) * size]

    output = None if request.output is None else rows(request.output)
    assert output is None or isinstance(output, Span)
    return replace(
        request,
        num_tokens=num_tokens,
        hidden_states=rows(request.hidden_states),
        topk_ids=None if request.topk_ids is None else rows(request.topk_ids),
        topk_weights=None if request.topk_weights is None else rows(request.topk_weights),
        scales=None if request.scales is None else rows(request.scales),
        output=output,
        signal=None,
        plan=None,
    )


def _joined(submission: Submission) -> OutputMemory:
    assert submission.outputs is not None
    return b"".join(host_view(output) for _, output in sorted(submission.outputs.items()))
