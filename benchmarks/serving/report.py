"""The sections about servers."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib import cpus
from benchmarks.lib.markdown import (
    Cell,
    Columns,
    Row,
    Section,
    about,
    by,
    lines,
    machine,
    paragraph,
    pivot,
    read,
    table,
    written,
)
from benchmarks.ranks.report import compared
from benchmarks.serving import deadlines
from examples.afd.intervals import read_timeline, times

ONE_GPU = "serving-h200.json"
WAYS = {
    ("http", None): "HTTP",
    ("sockets", None): "its bytes alone",
    ("shared memory", None): "shared memory of the host",
    ("shared memory", "cuda:0"): "of the server's GPU",
    ("shared memory", "cuda:1"): "of another GPU",
    ("channel", None): "channel, memory of the host",
    ("channel", "cuda:0"): "of the server's GPU",
    ("channel", "cuda:1"): "of another GPU",
}
"""How tensors reach the server, in the order of the columns."""
RANKS_WAYS = {
    ("http", None): "HTTP",
    ("channel", None): "channel, memory of the host",
    ("channel", "cuda:0"): "channel, memory of a GPU of the server",
}


def serving_machine(results: Path) -> str:
    """The machine and versions."""
    what = read(results, ONE_GPU)["about"]
    gpus, shown = len(what["gpu"].splitlines()), machine(what)
    return paragraph(
        f"{gpus} GPUs of one host: {shown['gpu']}, driver {shown['driver']}, torch {shown['torch']}."
    )


def serving(results: Path) -> str:
    """The median time of one caller by tokens and way."""
    rows = [row for row in _one_process(results) if row["callers"] == 1]
    # The GPU alone, as measured first: it varies by a few percent from one time to the next.
    alone = {tokens: of[0]["gpu_us"] for (tokens,), of in by(rows, "tokens").items()}
    cells = [
        (tokens, f"{alone[tokens]:.0f}", *times)
        for tokens, *times in pivot(rows, ["tokens"], ["way", "device"], "{p50_us:.0f}", order=WAYS)
    ]
    return table(("tokens", "GPU alone", *WAYS.values()), cells)


def serving_callers(results: Path) -> str:
    """Rates and times of several callers, and their rate with several HTTP processes."""
    rows = []
    for load in by(read(results, ONE_GPU)["rows"], "way", "device", "callers", "tokens").values():
        one, *several = sorted(load, key=lambda row: row.get("http_workers", 1))
        if one["callers"] > 1:
            rows.append(one | {"several": several[0]["tokens_per_second"] if several else None})
    return lines(
        rows,
        {
            "callers": "{callers}",
            "tokens of each request": "{tokens}",
            "way": lambda row: "HTTP" if row["way"] == "http" else f"{row['way']}, {row['device'] or 'host'}",
            "requests/s": lambda row: f"{row['tokens_per_second'] / row['tokens']:.0f}",
            "p50, µs": "{p50_us:.0f}",
            "p99, µs": "{p99_us:.0f}",
            "with several HTTP processes": lambda row: f"{row['several'] / row['tokens']:.0f}",
        },
    )


def serving_headline(results: Path) -> str:
    """What a caller adds to the GPU's time, in a sentence."""
    rows = {
        (row["way"], row["device"], row["tokens"]): row
        for row in reversed(_one_process(results))
        if row["callers"] == 1
    }
    one, many = (rows["channel", "cuda:0", tokens] for tokens in (1, 4096))
    http, http_many = (rows["http", None, tokens] for tokens in (1, 4096))
    gpu = machine(read(results, ONE_GPU)["about"])["gpu"]
    return paragraph(
        f"On one {gpu}, a call of DeepSeek-V3's whole layer through a [channel](transports.md#channels), "
        f"with tensors in the GPU's memory, takes {one['p50_us'] - one['gpu_us']:.0f} µs longer than the GPU "
        f"alone at 1 token, and {100 * (many['p50_us'] / many['gpu_us'] - 1):.0f}% longer at 4096. Over "
        f"HTTP it takes {http['p50_us'] - http['gpu_us']:.0f} µs longer at 1 token; at 4096, where bodies "
        f"take the time, {http_many['p50_us'] / 1e3:.0f} ms instead of {http_many['gpu_us'] / 1e3:.0f}."
    )


def ping_pong(results: Path) -> str:
    """What the timeline of the example amounts to."""
    about, intervals = read_timeline(results / "afd_timeline-h200.json")
    took = times(intervals)
    return paragraph(
        f"{about['title'][0].upper()}{about['title'][1:]}. Attention ran for {1e3 * took.attention:.1f} ms "
        f"and experts for {1e3 * took.experts:.1f} ms of {1e3 * took.wall:.1f} ms: {took.overlap:.0%} of the "
        "shorter is hidden behind the other."
    )


def ranks(field: str, keys: dict[str, str], wanted: Callable[[Row], bool], rising: bool) -> Section:
    """A field of callers by the number of GPUs, one beside several."""

    def write(results: Path) -> str:
        rows: list[Row] = []
        for file in sorted(results.glob("serving-*xh200.json")):
            gpus = int(file.name.removeprefix("serving-").partition("x")[0])
            rows += [
                row | {"gpus": gpus, "name": RANKS_WAYS[row["way"], row["device"]]}
                for row in read(results, file.name)["rows"]
                if row["http_workers"] == 1 and (row["way"], row["device"]) in RANKS_WAYS
                if wanted(row)
            ]
        several = {tuple(row[key] for key in keys.values()) for row in rows if row["gpus"] > 1}
        order = list(RANKS_WAYS.values())
        rows = [row for row in rows if tuple(row[key] for key in keys.values()) in several]
        rows.sort(key=lambda row: (order.index(row["name"]), row["callers"], row["tokens"]))
        return compared(rows, keys, field, "faster on {last}", rising)

    return write


def lanes(results: Path) -> str:
    """The p99 of decode in ms, and the share of prefill beside it, by way, layer and decode tokens."""
    rows = read(results, "lanes-h200.json")["rows"]
    rows = [row for row in rows if row["decode_tokens"] and _is_shown(row)]
    rows.sort(key=lambda row: (_WAYS.index(row["way"].partition(" ")[0].strip(",")), row["way"]))
    order = sorted({(row["layer"], row["decode_tokens"]) for row in rows}, reverse=True)

    def shown(row: Row) -> str:
        share = f" ({row['prefill_share']:.2f})" if row["prefill_share"] else ""
        return f"{row['p99_us'] / 1e3:.2f}{share}"

    cells = pivot(rows, ["way"], ["layer", "decode_tokens"], shown, order=order)
    return table(("way", *(f"{layer}, {tokens}" for layer, tokens in order)), cells) if rows else ""


def beside(results: Path) -> str:
    """The p99 of small requests, by the way that long ones are served and by what is beside."""
    rows = read(results, "beside-cpu.json")["rows"]
    names = [name for (name,) in by(rows, "beside")]
    goals = {row["long"]: f"{row['goal_ms']:.1f}" for row in rows if row["goal_ms"]}
    cells = [
        (long, *values, goals.get(str(long), ""))
        for long, *values in pivot(rows, ["long"], ["beside"], "{p99_ms:.1f}")
    ]
    return table(("long requests", *names, "goal"), cells)


def open_loop_machine(results: Path) -> str:
    """What was served where, and the goal."""
    content = read(results, "open_loop-cpu.json")
    what, rows = content["about"], content["rows"]
    shares = zip(what["tokens"], what["shares"], strict=True)
    sizes = ", ".join(f"{share:.0%} of {size}" for size, share in shares)
    best, overload = max(row["goodput"] for row in rows), rows[-1]
    return paragraph(
        f"{cpus.described(what)}; {what['seconds']:g} s each; {sizes} tokens; deadline "
        f"{what['deadline_ms']:g} ms. Capacity, by a closed loop: {content['capacity']:.0f} requests/s. At "
        f"{overload['load']:g} times it, goodput is {overload['goodput'] / best:.2f} of the best, and "
        f"{overload['late']} of the {overload['sent']} requests are late."
    )


def machine_of(name: str) -> Section:
    """The cores of server and callers, and the seconds of a row."""

    def write(results: Path) -> str:
        what = read(results, name)["about"]
        return paragraph(f"{cpus.described(what)}; {what['seconds']:g} s each.")

    return write


def fuzz(results: Path) -> str:
    """What was sent, and to which targets."""
    targets = read(results, "fuzz-cpu.json")["targets"]
    names = ", ".join(name.replace("_", " ") for name in targets)
    cases, failures = ([of[key] for of in targets.values()] for key in ("cases", "failures"))
    seconds = sum(of["seconds"] for of in targets.values())
    return paragraph(
        f"{min(cases)} cases or more of each kind ({names}) in {seconds:.0f} s: "
        f"{sum(failures) or 'no'} failures."
    )


def soak(results: Path) -> str:
    """What became of the requests of all kinds of callers, and the slowest kind's p99."""
    rows = []
    for name, where in (("soak-cpu.json", "CPU"), ("soak-h200.json", "H200")):
        content = read(results, name)
        p99, kind = max((of["p99_ms"] or 0.0, kind) for kind, of in content["kinds"].items())
        rows.append({"where": where, **content["total"], "p99": f"{p99:.0f} ({kind})"})
    counts = _same("sent", "right", "refused", "cancelled", "cut", "lost", "wrong", "failed")
    return lines(rows, {"soak": "{where}", **counts, "longest p99 of a kind, ms": "{p99}"})


def soak_machine(name: str, where: Callable[[dict[str, Any]], str]) -> Section:
    """How long it was, and what grew; on a GPU, too."""

    def write(results: Path) -> str:
        content = read(results, name)
        header, memory, descriptors = (content[key] for key in ("header", "memory", "descriptors"))
        gpu = content["device_memory"]
        on_gpu = f", the GPU's by {gpu['growth']:.1%} of {gpu['bytes'] / 2**20:.0f} MiB"
        device = on_gpu if gpu["bytes"] else ""
        commit = f" at {header['commit']}," if header.get("commit") else ""
        return paragraph(
            f"{header['seconds']:.0f} s on {where(header)}{commit} with "
            f"{content['idle_connections']} idle connections. After warm-up, memory grew by "
            f"{memory['growth']:.1%} of {memory['bytes'] / 2**20:.0f} MiB{device}, and descriptors by "
            f"{descriptors['growth']:.1%} of {descriptors['count']}. Exit codes after SIGTERM: "
            f"{content['exit_codes'][0]} and {content['exit_codes'][-1]}."
        )

    return write


def soak_device_calls(results: Path) -> str:
    """Device calls by the million, compared by the GPU. Raises FileNotFoundError."""
    found = read(results, "soak-device-2xh200.json")
    return paragraph(
        f"{found['calls']:,} calls of {found['callers']} callers, {found['tokens']:,} tokens, in "
        f"{found['seconds']:.0f} s on two {found['gpu']}s at {found['commit']}: {found['mismatches']} "
        "outputs differ from a request's in any bit, and the server's metrics counted "
        f"{found['compared_with_metrics']:,} calls."
    )


def soak_pool(results: Path) -> str:
    """What became of the calls to a pool, and their times by what happened to its servers."""
    return _pool_soak(read(results, "soak-pool-cpu.json"))


def soak_pool_vllm(results: Path) -> str:
    """The same of vLLM's calls on two GPUs, by each transport that was measured. Raises FileNotFoundError."""
    names = [name for name in _POOL_SOAKS if (results / name).exists()] or list(_POOL_SOAKS)
    texts = []
    for name in names:
        content = read(results, name)
        header = content["header"]
        limit = f" The limit of {header['late']:g} s does not apply during {{}}s."
        waits = limit.format(content["waits"][0]) if content["waits"] else ""
        gpus = f"vLLM on GPU {header['vllm_gpu']}, servers on GPUs {' and '.join(header['server_gpus'])}"
        texts.append(
            f"`{header['transport']}`, {gpus}, each an {header['gpu']}: {_pool_soak(content)}{waits}"
        )
    return "\n\n".join(map(paragraph, texts))


def _pool_soak(content: Row) -> str:
    header, times = content["header"], content["times"]
    counts = content["events"]
    events = ", ".join(f"{count} {event}{'s' if count != 1 else ''}" for event, count in counts.items())
    during = ", ".join(f"{times[event]['p99_ms']:.2f} during {event}s" for event in counts)
    return paragraph(
        f"{header['seconds']:.0f} s on {header['cores']} cores of an {header['cpu']} at {header['commit']}: "
        f"{events}. Of {content['calls']} calls, {content['lost']} were lost, {content['wrong']} wrong, and "
        f"{content['late']} took longer than {header['late']:g} s. Their p99 in ms was "
        f"{times['calm']['p99_ms']:.2f} in between, {during}."
    )


def soak_nixl(results: Path) -> str:
    """What a server held before and after its callers over NIXL were killed."""
    content = read(results, "soak-nixl-cpu.json")
    header, looks = content["header"], content["looks"]
    warm, last = looks[max(1, len(looks) // 4)], looks[-1]
    names = "channels", "agents", "descriptors", "threads"
    held = ", ".join(f"{last[name]} {name} ({looks[0][name]} before the first)" for name in names)
    return paragraph(
        f"{header['seconds']:.0f} s on {header['cores']} cores of an {header['cpu']} at {header['commit']}: "
        f"{content['callers']} callers were killed, {content['with_ends']} of them with their ends of the "
        f"channel. Of {content['answers'] + content['wrong']} answers, {content['wrong']} were wrong. The "
        f"server then held {held}; from {warm['kills']} kills on, its memory grew by "
        f"{last['memory'] / warm['memory'] - 1:.2%} of {warm['memory'] / 2**20:.0f} MiB."
    )


def pool_rules(results: Path) -> str:
    """The times of calls in ms by rule and load, and what became of them: means of all seeds."""
    rows = read(results, "pool_rules.json")["rows"]
    of_case = by(rows, "kind", "load")
    names = {"open": "{load:.0%}", "engine": "engines, {load:.0%}"}

    def cells(rule: str) -> Iterator[str]:
        made = [row for row in rows if row["rule"] == rule]
        for kind, load in of_case:
            case = [row for row in made if (row["kind"], row["load"]) == (kind, load)]
            yield " / ".join(f"{_mean(case, name):.0f}" for name in ("p50_ms", "p99_ms", "p999_ms"))
        calls = sum(row["calls"] for row in made)
        yield f"{100 * _mean(made, 'slow'):.2f}"
        yield f"{100 * sum(row['moved'] for row in made) / calls:.2f}"
        yield f"{sum(row['lost'] for row in made)}"

    columns = (names[kind].format(load=load) for kind, load in of_case)
    heads = ("rule", *columns, "at the slow server, %", "moved, %", "lost")
    return table(heads, [(rule, *cells(rule)) for (rule,) in by(rows, "rule")])


def _mean(rows: Sequence[Row], name: str) -> float:
    return statistics.fmean(row[name] for row in rows)


def _one_process(results: Path) -> list[Row]:
    """The rows of one HTTP process."""
    return [row for row in read(results, ONE_GPU)["rows"] if row.get("http_workers", 1) == 1]


def _is_shown(row: Row) -> bool:
    """Through channels, without what no server does, and without the longest and the shortest chunks."""
    way = row["way"]
    return way.startswith(_WAYS) and ("chunks" not in way or "1024" in way) and "HTTP" not in row["layer"]


def _same(*keys: str) -> dict[str, str]:
    """Columns that are named like what they have."""
    return {key: f"{{{key}}}" for key in keys}


def _if(count: str, text: str) -> Callable[[Row], str]:
    """A cell that is empty if the row has none of these."""
    return lambda row: text.format_map(row) if row[count] else ""


_OPEN_LOOP: dict[str, Cell] = {
    "of capacity": "{load:g}",
    "requests/s": "{offered:.0f}",
    "in time, 1/s": "{goodput:.0f}",
    "p50, ms": "{p50_ms:.0f}",
    "p99, ms": "{p99_ms:.0f}",
    "refused": "{refused}",
    "after, p50, ms": _if("refused", "{refused_p50_ms:.1f}"),
    "late": "{late}",
    "by at most, ms": _if("late", "{late_by_most_ms:.1f}"),
}
_TIMEOUTS = {
    name: deadlines.COLUMNS[name]
    for name in ("timeout, ms", "beside", "in time", "refused or late", "most, ms")
}
_WAYS = "alone", "turns", "joined", "lanes"
_SERVING_CPU = [
    ("connections", "{connections}"),
    ("tensor", "{datatype} [{tokens}, {hidden_size}]"),
    ("Starlette, requests/s", "{starlette[rps]:.0f}"),
    ("expertd", "{expertd[rps]:.0f}"),
    ("ratio", "{ratio:.2f}"),
    ("Starlette, p50, ms", "{starlette[p50_ms]:.3g}"),
    ("expertd", "{expertd[p50_ms]:.3g}"),
]
_STEPS = {
    "tokens": "{tokens}",
    "GPU alone": "{gpu_us:.0f}",
    "rows in pinned memory": "{pinned_us:.0f}",
    "in the GPU's memory": "{device_us:.0f}",
}
_DEVICE_CALLS: dict[str, Cell] = {
    "tokens": "{tokens}",
    "pause, µs": "{between_us:.0f}",
    "a layer, µs": "{layer_us:.1f}",
    "its own, µs": "{own_us:.1f}",
    "above, µs": "{over_us:.1f}",
    "of it the server's": lambda row: f"{row['server_us'] - row['own_us']:.1f}",
    "8 layers, p50, ms": "{step_ms:.3f}",
    "p99, ms": "{p99_ms:.3f}",
}
_CALLS_BY_HOST = {name: cell for name, cell in _DEVICE_CALLS.items() if name != "of it the server's"}
_CALLS_TOGETHER: Columns = {
    "tokens of a call": "{tokens}",
    "callers": "{callers}",
    "a layer, µs": "{layer_us:.1f}",
    "calls/s": "{calls_per_s:.0f}",
    "tokens/s": lambda row: f"{row['calls_per_s'] * row['tokens']:.0f}",
}
_LARGE_CALLS: Columns = {
    "tokens": "{tokens}",
    "a layer, µs": "{layer_us:.0f}",
    "its own, µs": "{own_us:.0f}",
    "above, µs": "{over_us:.0f}",
    "its bytes on the link, µs": "{link_us:.0f}",
    "above over these": lambda row: f"{row['over_us'] / row['link_us']:.2f}",
}
_POOL_SOAKS = "soak-pool-vllm-2xh200.json", "soak-pool-vllm-http-2xh200.json"
_NIXL = {
    "UCX_TLS": "{tls}",
    "tokens": "{tokens}",
    "NIXL alone, µs": "{bare:.0f}",
    "over NIXL": "{nixl:.0f}",
    "HTTP": "{http:.0f}",
    "channel on one machine": "{channel:.0f}",
    "over NIXL, requests/s": "{nixl_per_s:.0f}",
    "HTTP, requests/s": "{http_per_s:.0f}",
}
SECTIONS: dict[str, Section] = {
    "serving-headline": serving_headline,
    "serving-machine": serving_machine,
    "serving": serving,
    "serving-callers": serving_callers,
    "steps": written("steps-h200.json", _STEPS),
    "device-calls": written("stream_steps-2xh200.json", _DEVICE_CALLS),
    "calls-by-host": written("stream_steps_by_host-2xh200.json", _CALLS_BY_HOST),
    "calls-together": written("stream_steps_callers-2xh200.json", _CALLS_TOGETHER),
    "large-calls": written("stream_steps_large-2xh200.json", _LARGE_CALLS),
    "ping-pong": ping_pong,
    "serving-cpu-machine": about(
        "serving_cpu.json", "{cpus} cores of an {cpu}, Python {python}, Starlette {starlette}."
    ),
    "serving-cpu": written("serving_cpu.json", _SERVING_CPU),
    "serving-ranks": ranks(
        "p50_us",
        {"way": "name", "tokens": "tokens"},
        lambda row: row["callers"] == 1 and row["tokens"] in (1, 64, 4096),
        False,
    ),
    "serving-ranks-callers": ranks(
        "tokens_per_second",
        {"way": "name", "callers": "callers", "tokens of each request": "tokens"},
        lambda row: row["callers"] > 1,
        True,
    ),
    "lanes-machine": about("lanes-h200.json", "{gpu}, driver {driver}, torch {torch}, Python {python}."),
    "lanes": lanes,
    "open-loop-machine": open_loop_machine,
    "open-loop": written("open_loop-cpu.json", _OPEN_LOOP),
    "timeouts-machine": machine_of("deadlines-cpu.json"),
    "timeouts": written("deadlines-cpu.json", _TIMEOUTS, missing="-"),
    "beside-machine": machine_of("beside-cpu.json"),
    "beside": beside,
    "soak-machine": soak_machine(
        "soak-cpu.json", lambda header: f"2 cores of an {header['cpu']}, beside other work,"
    ),
    "soak": soak,
    "soak-gpu-machine": soak_machine("soak-h200.json", lambda _: "an NVIDIA H200"),
    "fuzz": fuzz,
    "pool-rules": pool_rules,
    "soak-device-calls": soak_device_calls,
    "soak-pool": soak_pool,
    "soak-pool-vllm": soak_pool_vllm,
    "soak-nixl": soak_nixl,
    "nixl-machine": about(
        "nixl-cpu.json",
        "{cpus} cores of an {cpu}, which all processes share; Python {python}, nixl-cu13 {nixl}; medians "
        "of {rounds} rounds of {seconds:g} s.",
    ),
    "nixl": written("nixl-cpu.json", _NIXL),
}
