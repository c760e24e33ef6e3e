"""The exchange over torch.distributed: gloo between CPUs, NCCL between GPUs.

Both exchange bytes by `all_to_all_single` with a size for each rank. Sizes must be known on the host, so a
dispatch waits for the device.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from expertd.service.device import device_of
from expertd.service.moe.parallel.exchange import Combined, Dispatched, Exchange, ExchangeError

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_REFUSED = -1  # in place of dtypes, in the header of a rank that refused its arguments


def join_group(store: Store, rank: int, num_ranks: int, *, timeout_seconds: float, backend: str) -> None:
    """Make the process's default group: `num_ranks` processes that meet in `store`.

    timeout_seconds  how long each later operation, and this one, waits for the other ranks
    backend          "gloo" for tensors of a CPU, "nccl" for a GPU's. gloo listens at the address of the
                     host's name, or of the interface that GLOO_SOCKET_IFNAME names

    Raises ExchangeError if they do not meet.
    """
    timeout = timedelta(seconds=timeout_seconds)
    store.set_timeout(timeout)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    except RuntimeError as error:
        expected = f"expected {num_ranks} ranks within {timeout_seconds:g} s"
        raise ExchangeError(f"rank {rank} joining the group: {expected}, got: {error}") from error


def all_rows(own: Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """[sum of counts, N], on the device of `own`: the rows own [counts[r], N] of each rank r, in their order.

    Collective, through the host's memory. Raises ExchangeError.
    """
    rows = own.cpu().contiguous().view(torch.uint8)
    padded = torch.nn.functional.pad(rows, (0, 0, 0, max(counts) - len(rows)))
    every = [torch.empty_like(padded) for _ in counts]
    try:
        dist.all_gather(every, padded, group=group)
    except RuntimeError as error:
        raise ExchangeError(f"rows of all ranks: expected every rank to take part, got: {error}") from error
    parts = [part[:count] for part, count in zip(every, counts, strict=True)]
    return torch.cat(parts).view(own.dtype).to(own.device)


class TorchExchange(Exchange):
    """An exchange over a process group; None: the default group.

    A group that has failed once is not used again, since its ranks may be at different operations.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.failed = None
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self._device = device_of("cuda" if "nccl" in str(dist.get_backend(group)) else "cpu").tensors

    def dispatch(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        owners: Tensor,
        row_dtype: torch.dtype,
    ) -> "_Dispatched":
        """See `Exchange.dispatch`. Two operations: the counts, then all else in one message a rank."""
        wanted = owners.new_zeros((len(owners), self.num_ranks + 1), dtype=torch.bool)
        wanted = wanted.scatter_(1, owners, True)[:, : self.num_ranks].t()  # [R, t]
        parts = hidden_states, topk_ids, topk_weights
        sizes = [part.shape[1] * part.itemsize for part in parts]
        dtypes = _DTYPES.index(hidden_states.dtype) * len(_DTYPES) + _DTYPES.index(row_dtype)
        slots = torch.stack([(owners == rank).sum() for rank in range(self.num_ranks)])
        header = torch.stack([wanted.sum(1), slots], dim=1)
        sent_counts, counts = self._counts(header, dtypes * 2**32 + sum(sizes))
        tokens = wanted.nonzero()[:, 1]  # rank by rank
        message = torch.cat([part.index_select(0, tokens).view(torch.uint8) for part in parts], dim=1)
        arrived = self.all_to_all("dispatch", message, *(c[:, 0].tolist() for c in (sent_counts, counts)))
        columns = zip(torch.split(arrived, sizes, dim=1), parts, strict=True)
        states, ids, weights = (column.view(part.dtype) for column, part in columns)
        return _Dispatched(self, states, ids, weights, wanted, owners, sent_counts, counts)

    def refuse(self) -> None:
        """See `Exchange.refuse`; raises ExchangeError only if the group fails."""
        self._headers(torch.zeros((self.num_ranks, 2), dtype=torch.int64, device=self._device), _REFUSED)

    def _headers(self, header: Tensor, layout: int) -> Tensor:
        sent, ones = torch.nn.functional.pad(header, (0, 1), value=layout), [1] * self.num_ranks
        return self.all_to_all("dispatch of counts", sent, ones, ones).cpu()

    def all_to_all(
        self, operation: str, rows: Tensor, sent_counts: Sequence[int], counts: Sequence[int]
    ) -> Tensor:
        """counts[r] rows of each rank r, in their order, for sent_counts[r] of rows [M, K] to it."""
        if self.failed is not None:
            raise ExchangeError(f"{operation}: expected a group without failures, got: {self.failed}")
        received = rows.new_empty((sum(counts), rows.shape[1]))
        try:
            dist.all_to_all_single(received, rows, list(counts), list(sent_counts), group=self._group)
        except RuntimeError as error:
            who = f"rank {self.rank} of {self.num_ranks}"
            self.failed = f"{operation} on {who}: expected every rank to take part, got: {error}"
            raise ExchangeError(self.failed) from error
        return received

    def _counts(self, header: Tensor, layout: int) -> tuple[Tensor, Tensor]:
        """int64 [R, 2], on the host: what was sent to each rank, and what came. Layouts must agree."""
        headers = self._headers(header, layout)
        layouts = headers[:, 2].tolist()
        if _REFUSED in layouts:
            refused = ", ".join(f"rank {rank}" for rank, other in enumerate(layouts) if other == _REFUSED)
            raise ExchangeError(f"dispatch: expected valid arguments on all ranks, got an error on {refused}")
        if len(set(layouts)) > 1:
            different = ", ".join(f"rank {rank}: {_describe(other)}" for rank, other in enumerate(layouts))
            raise ExchangeError(f"dispatch: expected one dtype and size on all ranks, got {different}")
        return header.cpu(), headers[:, :2]


class _Dispatched(Dispatched):
    """What a dispatch of `exchange` left for combine.

    wanted       bool [R, t], the tokens that went to each rank
    owners       int64 [t, top_k]
    sent_counts  int64 [R, 2] on the host: tokens and slots that went to each rank
    counts       int64 [R, 2] on the host: tokens and slots that came from each rank
    """

    def __init__(
        self,
        exchange: TorchExchange,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        wanted: Tensor,
        owners: Tensor,
        sent_counts: Tensor,
        counts: Tensor,
    ) -> None:
        self.hidden_states, self.topk_ids, self.topk_weights = hidden_states, topk_ids, topk_weights
        self._exchange = exchange
        self._wanted = wanted
        self._owners = owners
        self._sent_counts = sent_counts
        self._counts = counts

    def combine(self, rows: Tensor) -> Combined:
        """See `Dispatched.combine`."""
        row = self._wanted.flatten().cumsum(0).view_as(self._wanted) - 1
        index = torch.where(self._wanted, row, -1).t().to(torch.int32).contiguous()
        return Combined(self._send_back(rows, 0), index)

    def combine_slots(self, rows: Tensor) -> Combined:
        """See `Dispatched.combine_slots`."""
        owners = self._owners.flatten()
        slots = owners.sort(stable=True).indices  # rank by rank, as they come back
        row = torch.empty_like(slots)
        row[slots] = torch.arange(slots.numel(), device=slots.device)
        index = torch.where(owners < self._exchange.num_ranks, row, -1).view_as(self._owners).to(torch.int32)
        return Combined(self._send_back(rows, 1), index)

    def _send_back(self, rows: Tensor, column: int) -> Tensor:
        there, back = (counts[:, column].tolist() for counts in (self._sent_counts, self._counts))
        return self._exchange.all_to_all("combine", rows.view(torch.uint8), back, there).view(rows.dtype)


def _describe(layout: int) -> str:
    dtypes, size = divmod(layout, 2**32)
    of_tokens, of_rows = (str(_DTYPES[index]) for index in divmod(dtypes, len(_DTYPES)))
    return f"{of_tokens} tokens in {size} bytes, {of_rows} rows"
