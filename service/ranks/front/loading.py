"""The loader of a server with several ranks; see `expertd.service.engine.loading.load`."""

import logging
from contextlib import ExitStack

from expertd.service.engine.layers import Cancelled, LoadCancelledError
from expertd.service.engine.loading import LoadedLayers
from expertd.service.ranks.front.balancer import Balancer
from expertd.service.ranks.front.runner import RankRunner, Steps
from expertd.service.ranks.front.staging import StagingRegion, staging_bytes
from expertd.service.ranks.front.starting import RankLoadError
from expertd.service.ranks.front.supervisor import Supervisor
from expertd.service.ranks.partitions import RankPartitions
from expertd.service.ranks.placement import PlacementStore, load_windows
from expertd.service.ranks.recording import RankRecordings
from expertd.service.ranks.setup import MAX_SENT
from expertd.service.settings.model import Settings

logger = logging.getLogger(__name__)


def load_ranks(settings: Settings, cancelled: Cancelled) -> LoadedLayers:
    """Start the ranks of `settings`, and wait until each has loaded its part of every model.

    Raises ValueError for what a rank finds wrong with settings or files, RuntimeError if it fails otherwise,
    and LoadCancelledError once `cancelled` returns True.
    """
    placements = PlacementStore(settings) if settings.placement.policy is not None else None
    supervisor = Supervisor(settings, placements)
    with ExitStack() as stack:
        stack.callback(supervisor.stop)
        try:
            about = supervisor.start(cancelled)
        except RankLoadError as error:
            raise (ValueError if error.is_expected else RuntimeError)(str(error)) from error
        if about is None:
            raise LoadCancelledError
        tokens = settings.limits.max_batch_tokens
        num_bytes = max(staging_bytes(tokens, model.hidden_size, model.top_k) for model in settings.models)
        staging = [StagingRegion(num_bytes, supervisor.register) for _ in range(MAX_SENT)]
        stack.pop_all()
    backend, device, partitions = about
    logger.info("%d ranks are ready, each with its part of every layer", settings.num_ranks)
    steps = Steps(supervisor, staging, settings.num_ranks)

    loads = load_windows(settings)
    balancer = None
    if placements is not None:
        balancer = Balancer(settings, supervisor, placements, loads)
        balancer.start()

    def keep(sizes: dict[str, int]) -> None:
        supervisor.partitions = sizes

    # The CPU copies what is for CPU ranks, or for other nodes.
    in_place = settings.devices is not None and settings.nnodes == 1

    def close() -> None:
        if balancer is not None:
            balancer.stop()
        for memory in staging:
            memory.close()
        supervisor.stop()

    return LoadedLayers(
        backend,
        f"{settings.num_ranks} x {device}",
        {
            model.name: RankRunner(steps, index, model, loads[index] if placements else None)
            for index, model in enumerate(settings.models)
        },
        RankPartitions(supervisor.group, partitions, keep) if partitions else None,
        lambda: None,
        lambda _: None,
        supervisor.register,
        supervisor.register_file if in_place else None,
        supervisor.open_cuda if in_place else None,
        why_not=supervisor.why_not,
        ranks=steps.states,
        use=steps.use,
        placements=balancer,
        gpus=lambda: [state.device.uuid for state in steps.states()],
        recordings=RankRecordings(supervisor.group),
        max_running=MAX_SENT,
        close=close,
    )
