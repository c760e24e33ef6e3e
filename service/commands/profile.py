"""`expertd profile`: records steps of a layer with torch's profiler, without a server."""

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from expertd.service.commands.arguments import add_serve_arguments, read_arguments
from expertd.service.commands.cpus import prepare_openmp
from expertd.service.commands.devices import capabilities_of
from expertd.service.commands.serve import check_weights
from expertd.service.engine.profile_limits import MAX_SECONDS, MAX_STEPS, SECONDS, STEPS
from expertd.service.util.files import UnwritableError, check_writable, temporary_directory, write_whole
from expertd.service.util.heap import quick_imports

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from expertd.service.settings.model import Settings

_OUTPUT = Path("trace.json")


def add_parser(subparsers: "_SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the subcommand to `subparsers`."""
    parser = subparsers.add_parser(
        "profile",
        help="record steps of a layer with torch's profiler, without a server",
        description="Load a layer with the arguments of `expertd serve`, run steps of it with random tokens, "
        "and write a Chrome trace of them, which Perfetto opens. Listens nowhere.",
    )
    add_serve_arguments(parser)
    add = parser.add_argument
    add("--served-model", metavar="NAME", help="the layer to record, if the arguments name several")
    add("--steps", type=int, default=STEPS, help=f"steps to record, 1 to {MAX_STEPS} (default: {STEPS})")
    add("--tokens", type=int, default=64, help="tokens of each step (default: 64)")
    add(
        "--seconds",
        type=float,
        default=SECONDS,
        help=f"record fewer steps if they take longer, at most {MAX_SECONDS:g} (default: {SECONDS:g})",
    )
    add("-o", "--output", type=Path, default=_OUTPUT, metavar="FILE", help=f"(default: {_OUTPUT})")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the trace; return 0, 1 if the layer or a step fails, or 2 for invalid arguments or settings."""
    from expertd.service.checkpoints import resolve_checkpoints
    from expertd.service.settings.loader import SettingsError

    try:
        settings, _ = read_arguments(arguments)
        settings = _only(resolve_checkpoints(settings, capabilities_of), arguments.served_model)
        _check(settings, arguments)
        check_weights(settings)
    except SettingsError as error:
        return _refuse(2, *error.mistakes)
    except (ValueError, UnwritableError) as error:
        return _refuse(2, error)
    from expertd.service.util.logs import configure_logging

    configure_logging(settings.log_level, form=settings.log_format)
    prepare_openmp(settings)
    with quick_imports():
        from expertd.service.engine.errors import EngineError
        from expertd.service.engine.loading import Loader, load
        from expertd.service.engine.profile_run import profile_steps
    loader: Loader = load
    if settings.num_ranks > 1:
        from expertd.service.ranks.front.loading import load_ranks

        loader = load_ranks
    wanted = arguments.steps, arguments.tokens, arguments.seconds
    try:
        recording = asyncio.run(profile_steps(settings, *wanted, loader))
        write_whole(arguments.output, recording.trace, "--output")
    except (EngineError, UnwritableError) as error:
        return _refuse(1, error)
    except KeyboardInterrupt:
        return _refuse(130, f"interrupted: {arguments.output} is not written")
    print(
        f"{arguments.output}: {recording.steps} steps of {settings.models[0].name} in "
        f"{recording.seconds:.3f} s (tokens per step: {arguments.tokens}), {len(recording.trace)} bytes"
    )
    return 0


def _only(settings: "Settings", name: str | None) -> "Settings":
    """The settings with one model, which is loaded. Raises ValueError unless `name`, or None, says which."""
    from expertd.service.util.sentences import any_of, shown

    found = [model for model in settings.models if name in (None, model.name)]
    if len(found) != 1:
        names = [model.name for model in settings.models]
        got = "none" if name is None else shown(name)
        raise ValueError(f"--served-model: expected {any_of(names)}, got {got}")
    return settings.model_copy(update={"models": (found[0].model_copy(update={"load": True}),)})


def _check(settings: "Settings", arguments: argparse.Namespace) -> None:
    """Raise ValueError for what cannot be recorded, UnwritableError for what cannot be written."""
    if not 1 <= (steps := arguments.steps) <= MAX_STEPS:
        raise ValueError(f"--steps: expected 1 to {MAX_STEPS}, got {steps}")
    max_tokens = settings.limits.max_request_tokens
    if not 1 <= (tokens := arguments.tokens) <= max_tokens:
        raise ValueError(f"--tokens: expected 1 to limits.max_request_tokens ({max_tokens}), got {tokens}")
    if not 0 < (seconds := arguments.seconds) <= MAX_SECONDS:
        raise ValueError(f"--seconds: expected more than 0, at most {MAX_SECONDS:g}, got {seconds:g}")
    if settings.nnodes > 1:
        raise ValueError(f"nnodes: expected one, got {settings.nnodes}")
    if (output := arguments.output).is_dir() or not output.parent.is_dir():
        raise ValueError(f"--output: expected a file in a directory that exists, got {output}")
    check_writable(output, "--output")
    temporary_directory("trace")


def _refuse(code: int, *mistakes: object) -> int:
    for mistake in mistakes:
        print(f"expertd profile: {mistake}", file=sys.stderr)
    return code
