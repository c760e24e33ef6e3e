"""Every tile configuration on shapes of few groups and on large ones: bits against NORMAL's, times by CUPTI."""

import json, os, sys, torch
from benchmarks.problem import Pool
from benchmarks.shapes import Shape
from benchmarks.timing import best_of_turns
from benchmarks import deep_gemm_peer
from expertd import kernels
from expertd.layout import Layout
from expertd.kernels.backends.hopper import tiles
from expertd.kernels.backends.hopper.grouped_gemm import GroupedGemm
from expertd.kernels.backends.hopper.launch import Kernels, current_stream

kernels.resolve_backend("hopper").warm_up()
pool = Pool(1 << 30)
K = Kernels()
PLANS = {}
for c in tiles.CONFIGS:
    for height in range(1, c.steps + 1) if not c.swap_ab else (c.steps,):
        PLANS[f"{c.name}/{height}"] = tiles.Plan(c, 16 * height)
ops = {name: GroupedGemm(K, lambda *a, plan=plan: plan) for name, plan in PLANS.items()}


def shape(g, m, n, k):
    return Shape("x", Layout.CONTIGUOUS, (m,) * g, n, k, 0)


SHAPES = [
    shape(g, m, n, k)
    for g, m, n, k in (
        *((1, m, 4096, 7168) for m in (1, 16, 33, 70, 129, 200, 300, 512, 1000, 1186)),
        *((1, m, 3072, 5120) for m in (16, 70, 300, 1000)),
        *((1, m, 6144, 7168) for m in (1, 200, 512, 1000)),
        *((2, m, 6144, 7168) for m in (70, 200, 512)),
        *((2, m, 3072, 5120) for m in (200, 512, 1000)),
        *((4, m, 3072, 5120) for m in (200, 512)),
        (1, 70, 2048, 768),
        (1, 512, 1536, 2048),
        (8, 1000, 4096, 7168),
        (8, 1000, 7168, 2048),
        (4, 4096, 4096, 7168),
        (4, 4096, 7168, 2048),
        (32, 1024, 4096, 7168),
        (32, 1024, 7168, 2048),
    )
]
peer = deep_gemm_peer.available()
if peer:
    deep_gemm_peer.compile_ahead([[s] for s in SHAPES])
rows = []
for s in SHAPES:
    p = pool.problem(s)
    big = sum(s.rows) > 2000

    def run(op, p=p, s=s):
        from expertd.kernels.backends.hopper.grouped_gemm import Groups

        on = current_stream(0)
        op.multiply(on, s.layout, p.a, p.b, Groups(p.extents), p.out, sum(s.rows) / s.num_groups, None)
        return p.out

    names = [n for n in ops if not (big and ("swap" in n or "n32" in n or "n64" in n or n.endswith("/1")))]
    names = [n for n in names if not ("swap" in n and s.rows[0] > 200)]
    ref = None
    bad = []
    for n in names:
        p.out.fill_(float("nan"))
        got = run(ops[n]).clone()
        torch.cuda.synchronize()
        if ref is None and n.startswith("m192/3"):
            ref = got
    ref = ref if ref is not None else (p.out.fill_(float("nan")), run(ops["m192/3"]).clone())[1]
    for n in names:
        p.out.fill_(float("nan"))
        got = run(ops[n]).clone()
        if not torch.equal(got, ref):
            bad.append(n)
    calls = [(lambda n=n: run(ops[n]), "grouped_gemm") for n in names] + [(p.run, "grouped_gemm")]
    if peer:
        call, _ = deep_gemm_peer.prepare(p)
        calls.append((call, deep_gemm_peer.KERNEL))
    times = best_of_turns(calls, 5, 2)
    labels = [*names, "chosen", *(["DeepGEMM"] if peer else [])]
    row = {"g": s.num_groups, "m": s.rows[0], "n": s.n, "k": s.k, **dict(zip(labels, times)), "bad": bad}
    rows.append(row)
    best = min(names, key=lambda n: row[n])
    print(
        s.num_groups,
        s.rows[0],
        s.n,
        s.k,
        "best",
        best,
        f"{row[best]:.1f} chosen {row['chosen']:.1f} DG {row.get('DeepGEMM', 0):.1f} |",
        " ".join(f"{n}={row[n]:.1f}" for n in names),
        "BAD " + ",".join(bad) if bad else "",
        flush=True,
    )
    if "OUT" in os.environ:
        json.dump(rows, open(os.environ["OUT"] + "/wide.json", "w"))
