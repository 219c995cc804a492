"""This program probes which scaled and grouped GEMMs PyTorch accepts on this GPU, how exact they are, and how fast.

    python dev/probe_gemm.py            all of it, some three minutes; run it from the repository's root
    python dev/probe_gemm.py sizes      one part: dtypes, rows, sizes, align, grouped, speed, groups, calls

Each line has what was called, then the largest error as a fraction of |A|·|B|ᵀ (an FP32 accumulation is near 1e-7, FP8
tensor cores near 1e-4), or the first line of the refusal. The calls are the raw ones: what they refuse or get wrong is
what `mezzotint/kernels/scaled_mm.py` has to work around by padding.
"""

# ruff: noqa: B023, E731 (closures over loop variables run before the loop goes on)

import itertools
import pathlib
import sys
import time
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import torch

from mezzotint.constants import E4M3, E5M2, FP8_TORCH, cdiv, rup
from mezzotint.kernels.gemm import Operand, gemm
from mezzotint.kernels.grouped_gemm import group_ends, grouped_gemm_packed
from tests.operands import decode, quantize, to

F32, F16, B16 = torch.float32, torch.float16, torch.bfloat16
SHORT = {F32: "f32", F16: "f16", B16: "b16", None: "-", E4M3: "e4m3", E5M2: "e5m2"}
v2 = torch.ops.aten._scaled_mm_v2.default


def attempt(label: str, call: Callable[[], torch.Tensor], expected: Callable[[], tuple]) -> None:
    """Run a call, compare its result, and print one line."""
    try:
        got = call()
        torch.cuda.synchronize()
    except Exception as error:
        print(f"{label:<74} REFUSED {str(error).strip().splitlines()[0][:110]}", flush=True)
        return
    exact, magnitude = expected()
    rounding = torch.finfo(got.dtype).eps / 2 * exact.abs() if got.dtype != F32 else 0.0
    worst = (((got.double() - exact).abs() - rounding).clamp_min(0) / magnitude.clamp_min(1e-30)).max()
    print(f"{label:<74} {float(worst):.2e}{'' if bool(got.isfinite().all()) else ' NOT FINITE'}", flush=True)


def truth(a: Operand, b: Operand, bias: torch.Tensor | None = None) -> Callable[[], tuple]:
    def compute() -> tuple:
        x, y = decode(a).cuda(), decode(b).cuda()
        exact, magnitude = x @ y.t(), x.abs() @ y.abs().t()
        return (exact, magnitude) if bias is None else (exact + bias.double(), magnitude + bias.double().abs())

    return compute


def pair(kind_a: str, kind_b: str, m: int, n: int, k: int, dtypes: tuple[int, int] = (E4M3, E4M3)) -> tuple:
    a = quantize(torch.randn(m, k), kind_a, dtype=dtypes[0])
    b = quantize(torch.randn(n, k), kind_b, dtype=dtypes[1])
    return to(a, "cuda"), to(b, "cuda")


def codes(op: Operand) -> torch.Tensor:
    return op.data.view(FP8_TORCH[op.dtype])


def block_scale(op: Operand) -> torch.Tensor:
    """Return the scales as `_scaled_mm_v2` reads them, without any padding of rows: 1x128 with exactly R rows."""
    if op.kind == "block2d":
        return op.scale.t()
    return op.scale[:, : op.data.shape[0]].contiguous().t()


RECIPE = {"block1d": 4, "block2d": 5}


def raw(a: Operand, b: Operand, *, bias=None, out_dtype=B16, fast=False, version=1) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """Call PyTorch's GEMM without any padding."""
    x, yt = codes(a), codes(b).t()
    if a.kind in RECIPE:
        if version == 1:
            scale_b = block_scale(b) if b.kind == "block2d" else block_scale(b).t()
            scale_a = block_scale(a).t() if a.kind == "block2d" else block_scale(a)
            return torch._scaled_mm(x, yt, scale_a, scale_b, bias=bias, out_dtype=out_dtype, use_fast_accum=fast)
        scales = [block_scale(a)], [RECIPE[a.kind]], [0], [block_scale(b)], [RECIPE[b.kind]], [0]
        return v2(x, yt, *scales, bias, out_dtype, [], fast)
    scale_a, scale_b = (a.scale, b.scale) if a.kind == "tensor" else (a.scale[:, None], b.scale[None, :])
    if version == 1:
        return torch._scaled_mm(x, yt, scale_a, scale_b, bias=bias, out_dtype=out_dtype, use_fast_accum=fast)
    recipe = 0 if a.kind == "tensor" else 1
    return v2(x, yt, [scale_a], [recipe], [0], [scale_b], [recipe], [0], bias, out_dtype, [], fast)


KINDS = [("tensor", "tensor"), ("row", "row"), ("block1d", "block1d"), ("block1d", "block2d"), ("block2d", "block1d")]


def dtypes() -> None:
    """Try element types, output types and bias types."""
    for kinds, version in itertools.product(KINDS, (1, 2)):
        for types in ((E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)):
            a, b = pair(*kinds, 256, 512, 1024, types)
            for out in (B16, F16, F32):
                for bias_dtype in (None, B16, F16, F32) if types == (E4M3, E4M3) else (None,):
                    bias = None if bias_dtype is None else torch.randn(512, device="cuda").to(bias_dtype)
                    name = f"v{version} {kinds[0]}·{kinds[1]} {SHORT[types[0]]}·{SHORT[types[1]]}"
                    label = f"{name} out {SHORT[out]} bias {SHORT[bias_dtype]}"
                    attempt(label, lambda: raw(a, b, bias=bias, out_dtype=out, version=version), truth(a, b, bias))


def rows() -> None:
    """Try numbers of rows of A, which nothing documents."""
    for kinds in KINDS:
        for m in (1, 2, 3, 4, 5, 8, 12, 16, 17, 20, 33, 64, 127, 130, 260):
            a, b = pair(*kinds, m, 256, 512)
            attempt(f"{kinds[0]}·{kinds[1]} m={m} n=256 k=512", lambda: raw(a, b, version=2), truth(a, b))


def sizes() -> None:
    """Try n and k that are multiples of 16 and not of 128, and others."""
    for kinds, version in itertools.product(KINDS, (1, 2)):
        for n, k in (
            (8, 128),
            (16, 128),
            (48, 128),
            (144, 512),
            (272, 512),
            (256, 16),
            (256, 144),
            (256, 640),
            (256, 528),
        ):
            a, b = pair(*kinds, 64, n, k)
            label = f"v{version} {kinds[0]}·{kinds[1]} m=64 n={n} k={k}"
            attempt(label, lambda: raw(a, b, version=version), truth(a, b))


def align() -> None:
    """Try operands and outputs that start at 16, 32, … bytes, as slices of larger ones do."""
    for kinds in (("tensor", "tensor"), ("row", "row"), ("block1d", "block2d")):
        for start in (0, 1, 2, 4, 8):
            a, b = pair(*kinds, 256, 272, 400 if "block" not in kinds[0] else 384)
            spare = torch.zeros(264, a.data.shape[1], dtype=torch.uint8, device="cuda")
            spare[start : start + 256] = a.data
            shifted = Operand(spare[start : start + 256], a.scale, kind=a.kind, dtype=a.dtype)
            label = f"{kinds[0]}·{kinds[1]} A at byte {start * a.data.shape[1]}"
            attempt(label, lambda: raw(shifted, b, version=2), truth(a, b))
            if kinds[0] != "block1d":
                big = torch.full((264, 272), float("nan"), dtype=B16, device="cuda")
                scales = (a.scale, b.scale) if a.kind == "tensor" else (a.scale[:, None], b.scale[None, :])
                out = big[start : start + 256]
                call = lambda: torch._scaled_mm(codes(a), codes(b).t(), *scales, out_dtype=B16, out=out)
                attempt(f"{kinds[0]}·{kinds[1]} out at byte {start * 544}", call, truth(a, b))


def grouped() -> None:
    """Try `torch._grouped_mm` and `torch._scaled_grouped_mm`: group sizes, an empty
    group, both ways of being ragged."""
    for splits in ([64, 128, 64], [3, 17, 44], [16, 0, 48], [8, 24, 32]):
        total, count = sum(splits), len(splits)
        ends = group_ends(splits, torch.device("cuda"))
        x, dy = torch.randn(total, 256, device="cuda").to(B16), torch.randn(total, 128, device="cuda").to(B16)
        w = torch.randn(count, 128, 256, device="cuda").to(B16)
        forward = lambda: truth_groups(x.split(splits), w)
        attempt(f"bf16 fprop {splits}", lambda: torch._grouped_mm(x, w.transpose(1, 2), offs=ends), forward)
        call = lambda: torch._grouped_mm(x, w.transpose(1, 2), offs=ends, out_dtype=F32)
        attempt(f"bf16 fprop {splits} out f32", call, forward)
        transposed = [t.t() for t in dy.split(splits)], [t.t() for t in x.split(splits)]
        backward = lambda: tuple(t.view(count, 128, 256) for t in truth_groups(*transposed))
        attempt(f"bf16 wgrad {splits}", lambda: torch._grouped_mm(dy.t(), x, offs=ends), backward)
        qx = to(quantize(x.cpu(), "row"), "cuda")
        qw = to(quantize(w.cpu().view(-1, 256), "row"), "cuda")
        xs, ws = decode(qx).cuda().split(splits), decode(qw).cuda().view(count, 128, 256)
        y = codes(qw).view(count, 128, 256).transpose(1, 2)
        for fast in (False, True):
            call = lambda: torch._scaled_grouped_mm(
                codes(qx),
                y,
                qx.scale,
                qw.scale.view(count, -1),
                offs=ends,
                out_dtype=B16,
                use_fast_accum=fast,
            )
            attempt(f"fp8 row fprop {splits} fast={fast}", call, lambda: truth_groups(xs, ws))


def truth_groups(xs, ws) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[no-untyped-def]
    pairs = [(x.double(), w.double()) for x, w in zip(xs, ws, strict=True)]
    return torch.cat([x @ w.t() for x, w in pairs]), torch.cat([x.abs() @ w.abs().t() for x, w in pairs])


def time_us(call: Callable[[], object], repeat: int = 10) -> float:
    """Return the median of single calls, in microseconds of the device."""
    for _ in range(3):
        call()
    spans = []
    for _ in range(repeat):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        spans.append(start.elapsed_time(stop) * 1e3)
    return sorted(spans)[len(spans) // 2]


def random_operand(kind: str, rows: int, size: int) -> Operand:
    """Return an operand with plausible bytes, without quantizing: speed depends on them only through power."""
    x = torch.randn(rows, size, device="cuda")
    data = x.to(torch.float8_e4m3fn).view(torch.uint8)
    scale = {
        "tensor": lambda: torch.ones(1, device="cuda"),
        "row": lambda: torch.ones(rows, device="cuda"),
        "block1d": lambda: torch.ones(cdiv(size, 128), rows, device="cuda"),
        "block2d": lambda: torch.ones(cdiv(rows, 128), rup(cdiv(size, 128), 4), device="cuda"),
        "mx": lambda: torch.full((rows, size // 32), 127, dtype=torch.uint8, device="cuda"),
        "nv": lambda: torch.full((rows, size // 16), 0x38, dtype=torch.uint8, device="cuda"),
    }
    if kind == "high":
        return Operand(x.to(B16))
    if kind == "nv":
        return Operand(data[:, : size // 2].contiguous(), scale[kind](), torch.ones(1, device="cuda"), kind, 10)
    return Operand(data, scale[kind](), kind=kind, dtype=E4M3)


def speed() -> None:
    """Measure the TFLOP/s of `gemm` at 8192³."""
    n = 8192
    bias = torch.zeros(n, dtype=B16, device="cuda")
    for kinds in (("high", "high"), *KINDS, ("block2d", "block2d"), ("mx", "mx"), ("nv", "nv"), ("high", "mx")):
        a, b = random_operand(kinds[0], n, n), random_operand(kinds[1], n, n)
        total = torch.zeros(n, n, device="cuda")
        cases = {
            "b16": lambda: gemm(a, b, out_dtype=B16),
            "b16 fast": lambda: gemm(a, b, out_dtype=B16, fast_accum=True),
            "b16 + bias": lambda: gemm(a, b, out_dtype=B16, bias=bias),
            "f32": lambda: gemm(a, b, out_dtype=F32),
            "f32 +=": lambda: gemm(a, b, out_dtype=F32, accumulate=total),
        }
        line = ", ".join(f"{name} {2 * n**3 / time_us(call) / 1e6:.0f}" for name, call in cases.items())
        print(f"{kinds[0]}·{kinds[1]:<10} TFLOP/s: {line}", flush=True)


def groups() -> None:
    """Compare grouped kernels with one GEMM after another, with weights apart (copied to
    be joined) and side by side."""
    for count, tokens, out, into in (
        (8, 2048, 4096, 4096),
        (8, 512, 4096, 4096),
        (64, 256, 2048, 4096),
        (64, 64, 2048, 4096),
    ):
        for kind in ("high", "row"):
            a = random_operand(kind, count * tokens, into)
            b = random_operand(kind, count * out, into)
            scales_a = [None] * count if a.scale is None else a.scale.split(tokens)
            scales_b = [None] * count if b.scale is None else b.scale.split(out)
            xs = [Operand(d, s, kind=kind, dtype=a.dtype) for d, s in zip(a.data.split(tokens), scales_a, strict=True)]
            ws = [Operand(d, s, kind=kind, dtype=b.dtype) for d, s in zip(b.data.split(out), scales_b, strict=True)]
            apart = [Operand(w.data.clone(), w.scale, kind=kind, dtype=b.dtype) for w in ws]
            flops = 2 * count * tokens * out * into
            cases = {
                "joined": lambda: grouped_gemm_packed(xs, ws, out_dtype=B16),
                "apart": lambda: grouped_gemm_packed(xs, apart, out_dtype=B16),
                "one by one": lambda: [gemm(x, w, out_dtype=B16) for x, w in zip(xs, apart, strict=True)],
                "copy of B": lambda: torch.cat([w.data for w in apart]),
            }
            line = ", ".join(
                f"{name} {(t := time_us(call)):.0f} us ({flops / t / 1e6:.0f})" for name, call in cases.items()
            )
            print(f"{kind:<5} {count} x {tokens} tokens {out}x{into}: {line}", flush=True)


def calls() -> None:
    """Measure the host microseconds of one small `gemm`, beside the raw call."""
    for kinds in (("high", "high"), *KINDS, ("mx", "mx"), ("nv", "nv")):
        a, b = random_operand(kinds[0], 128, 512), random_operand(kinds[1], 128, 512)
        plain = (lambda: torch.mm(a.data, b.data.t())) if kinds[0] == "high" else (lambda: raw(a, b, version=2))
        line = []
        for name, call in (("gemm", lambda: gemm(a, b, out_dtype=B16)), ("raw", plain)):
            if name == "raw" and kinds[0] in ("mx", "nv"):
                continue
            for _ in range(20):
                call()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(300):
                call()
            line.append(f"{name} {(time.perf_counter() - start) / 300 * 1e6:.1f} us")
            torch.cuda.synchronize()
        print(f"{kinds[0]}·{kinds[1]:<10} host: {', '.join(line)}", flush=True)


PARTS = (dtypes, rows, sizes, align, grouped, speed, groups, calls)

if __name__ == "__main__":
    torch.manual_seed(0)
    wanted = set(sys.argv[1:])
    print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name(), torch.cuda.get_device_capability())
    for part in PARTS:
        if not wanted or part.__name__ in wanted:
            print(f"\n== {part.__name__}: {part.__doc__}")
            try:
                part()
            except Exception as error:
                print(f"{part.__name__} stopped: {error!r}")
