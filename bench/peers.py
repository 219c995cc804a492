"""Against the peers: compare BF16, torchao's recipes and ours in one run, eager and compiled.

    python -m bench peers [--parts a,b,c,d] [--cases layers,...] [--shapes 16384x4096x4096,...]
                          [--recipes delayed,torchao-rowwise]
                          [--modes eager,compiled,graphs] [--reps 11] [--budget SECONDS] [--one-thread]
                          [--skip-guards] [--memory lean] [--profile] [--small]
                          [--json out.json] [--markdown out.md] [--figure out.png]
    python -m bench peers --load a.json,b.json [--markdown out.md] [--figure out.png]

The parts are: a) one Linear; b) two layers of a Llama 3 8B, ours a `TransformerLayer` and then the plain layer that
`convert` was given, and the first with four microbatches, over which ours keeps the quantized weights; c) quantization
against a device copy (`bench quantize`); d) a grouped linear of 8 experts, balanced and ragged. Forward and backward
run on random data; inputs change from repetition to repetition.

`compiled` is torch.compile, one whole graph, with the settings that a user has by default; `graphs` is the same
with CUDA graphs (reduce-overhead), for the smallest linear. Times are medians of CUDA events after a warm-up. The
candidates of a case take turns, each long enough for the card's clock to settle; BF16 runs again at its end
(`bf16-again`), which shows the drift of the card. In d BF16 is PyTorch's grouped product and `bf16-loop` one
expert after the other; the faster of them is what others are compared with. torchao is left out there, because
what it has for experts is a prototype.

TFLOP/s count the products of linears alone. `GEMMs` are the products of one step alone, with operands quantized before;
`floor` adds the least bytes that quantization moves, at the speed of a copy that is measured beside. `held` is what the
allocator gave out between forward and backward, `peak` in the step, both less what was there before it.

The recipes `by-hand` and `by-hand-scales-given` are an FP8 linear in plain PyTorch (`_by_hand.py`), for part a alone:
where the host decides, as at 64x4096x4096, no compiled FP8 linear can be much faster.

With `--profile` each candidate then runs again under PyTorch's profiler. `kernels` is the sum of its kernels on the
GPU, `launches` their number (`--json` has each by name), `idle` the time between them. Of a compiled step `host` is the
host's time, with an empty queue in front of it, and `code` the part of it in the code that Inductor wrote.
"""

import argparse
import datetime
import gc
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from bench import _peers_report, _profile, quantize
from bench._candidates import BASE, BY_DEFAULT, CANDIDATES, MODES, Candidate, Runner, called, missing
from bench._floors import FORMATS, Products, least_bytes
from bench._models import LlamaSizes
from bench._peers_cases import Case, expert_cases, linear_cases, llama_cases
from bench._timing import ONE_THREAD, turns_ms
from mezzotint.memory import MEMORY_MODES

PARTS = ("a", "b", "c", "d")
SHAPES = "16384x4096x4096,16384x4096x14336,16384x14336x4096,16384x8192x8192,2048x2048x2048"
WARMUP, REPS = 4, 11
SMALL: dict[str, Any] = {
    "shapes": "64x64x96,32x32x32",
    "llama": LlamaSizes(hidden=64, ffn=96, heads=4, kv_heads=2, sequence=32, batch=2, layers=1),
    "experts": (256, 64, 64),
}
AGAIN = f"{BASE}-again"
Row = dict[str, Any]


@dataclass(slots=True)
class Bench:
    """A `Bench` is one run: what to measure, on what, and until when."""

    device: str
    backend: str
    reps: int
    deadline: float  # of time.perf_counter()
    skips_guards: bool = False
    held: str = "default"  # the memory mode of ours
    profiles: bool = False

    def is_over(self) -> bool:
        return time.perf_counter() > self.deadline

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def measure(self, case: Case, modes: list[str], candidates: list[Candidate]) -> Iterator[list[Row]]:
        """Yield, mode by mode, a row for each candidate."""
        taking = [candidate for candidate in candidates if candidate.kind in case.models]
        torch.manual_seed(0)
        inputs = case.inputs(self.device)
        floors = {} if self.is_over() else self.floors(case, taking, inputs)
        for mode in modes:
            torch._dynamo.reset()
            gc.collect()
            yield [
                {"part": case.part, "case": case.name, "mode": mode, **row}
                for row in self.measure_mode(case, mode, taking, inputs, floors)
            ]
        torch._dynamo.reset()
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def measure_mode(
        self, case: Case, mode: str, candidates: list[Candidate], inputs: Any, floors: dict[str, Row]
    ) -> list[Row]:
        rows: list[Row] = []
        runners: dict[str, Runner] = {}
        for candidate in candidates:
            row: Row = {"candidate": candidate.name}
            reason = missing(candidate) or ("the budget is spent" if self.is_over() else "")
            if reason:
                row |= {"left_out": reason}
            else:
                try:
                    runners[candidate.name], made = self.prepare(candidate, case, mode, inputs)
                    row |= made
                except Exception as error:  # a failure must not cost the other candidates their numbers
                    row |= {"error": quantize.first_line(error)}
            rows.append(row)
        names = list(runners)
        times = dict(zip(names, turns_ms([runners[name] for name in names], self.device, self.reps), strict=True))
        if BASE in runners:
            rows.append({"candidate": AGAIN})
            (times[AGAIN],) = turns_ms([runners[BASE]], self.device, self.reps)
        bases = [times[name] for name in names if CANDIDATES[name].is_base]
        for row in rows:
            ms = times.get(row["candidate"])
            if ms is not None:
                row |= {"ms": ms, "tflops": case.flops * case.micro_batches / ms / 1e9}
                row |= {"ratio": min(bases) / ms} if bases else {}
                row |= floors.get(row["candidate"], {})
                row |= {"of_floor": ms / row["floor_ms"]} if "floor_ms" in row else {}
            if self.profiles and ms is not None and row["candidate"] in runners:
                row |= self.profile(runners[row["candidate"]], mode, ms)
        return rows

    def profile(self, step: Runner, mode: str, ms: float) -> Row:
        """Return the kernels of a step that takes `ms` and, if it is compiled, the host's time, in all and in the code
        of its graphs."""
        row: Row = {}
        if self.device == "cuda":
            found = _profile.kernels(step, ms)
            row = {"kernels": found.by_name, "kernels_ms": found.ms, "idle_ms": found.idle_ms}
            row["launches"] = found.launches
        is_written = mode != "eager" and self.backend == "inductor"
        if is_written:
            row["host_ms"], row["code_ms"] = _profile.host_ms(step, self.wait)
        return row

    def prepare(self, candidate: Candidate, case: Case, mode: str, inputs: Any) -> tuple[Runner, Row]:
        """Return a warm runner, compiled if asked, and a row with its graphs, seconds of compilation and memory."""
        model = candidate.build(case.models)
        call = called(model, mode, self.backend, self.skips_guards)
        runner = Runner(candidate, model, call, inputs, case.micro_batches, mode == "graphs", self.held)
        stats = torch._dynamo.utils.counters["stats"]
        graphs, seconds = stats["unique_graphs"], []
        for _ in range(WARMUP if self.device == "cuda" else 2):
            start = time.perf_counter()
            runner()
            self.wait()
            seconds.append(time.perf_counter() - start)
        row: Row = {}
        if mode != "eager":
            row = {"graphs": stats["unique_graphs"] - graphs, "compile_s": seconds[0] - seconds[-1]}
        # A CUDA graph has memory of its own, which it keeps, so that of a step cannot be measured.
        return runner, row | ({} if runner.graphs else self.memory(runner))

    def memory(self, runner: Runner) -> Row:
        """Return the bytes held between forward and backward, and their peak, beyond what is there without a step."""
        if self.device != "cuda":
            return {}
        runner.clear()
        self.wait()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        x, gradient = next(runner.turn)
        y = runner.forward(x, runner.keeps or None)
        held = torch.cuda.memory_allocated() - before
        y.backward(gradient)
        self.wait()
        peak = torch.cuda.max_memory_allocated() - before
        del y
        runner.clear()
        return {"held": held, "peak": peak}

    def floors(self, case: Case, candidates: list[Candidate], inputs: Any) -> dict[str, Row]:
        """Return by name the milliseconds of the products alone, and with the least bytes of one linear."""
        products: dict[str, Products] = {}
        for name in (BASE, *FORMATS):
            if name not in [candidate.name for candidate in candidates]:
                continue
            candidate = Candidate(name, "mezzotint", CANDIDATES[name].recipe)
            try:
                model = candidate.build(case.models)
                runner = Runner(candidate, model, model, inputs)
                runner()
                products[name] = Products.of(runner)
                products[name]()
                runner.clear()
            except Exception as error:
                print(f"{case.name}, products of {name}: {quantize.first_line(error)}", file=sys.stderr)
        source = inputs[0][0].detach()
        target = torch.empty_like(source)
        steps = [*products.values(), lambda: target.copy_(source)]
        steps[-1]()
        *alone, copy = turns_ms(steps, self.device, self.reps)
        found: dict[str, Row] = {}
        for name, ms in zip(products, alone, strict=True):
            found[name] = {"gemm_ms": ms * case.micro_batches, "products": len(products[name].calls)}
            if case.linear is not None:
                moved = least_bytes(name, *case.linear)
                found[name] |= {"least_bytes": moved, "floor_ms": ms + copy * moved / (2 * source.nbytes)}
        return found


def main(argv: list[str] | None = None) -> int:
    """Measure (or load), print, write and draw; return 1 if a candidate failed."""
    args = _parser().parse_args(argv)
    if args.figure and find_spec("matplotlib") is None:
        raise SystemExit("--figure needs matplotlib: pip install matplotlib, or draw elsewhere with --load")
    with torch.autograd.set_multithreading_enabled(not args.one_thread):
        report = load(args.load.split(",")) if args.load else measure(args)
    _peers_report.show(report)
    if args.markdown:
        Path(args.markdown).write_text(_peers_report.markdown(report))
    if args.figure:
        _peers_report.draw(report, Path(args.figure))
    return 1 if any("error" in row for row in report["rows"]) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench peers", description=__doc__.split("\n")[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="of a (linear), b (layers), c (quantization), d (MoE)")
    parser.add_argument("--cases", default="", help="those alone that have one of these in their names")
    parser.add_argument("--shapes", help=f"of a: tokens x in x out; {SHAPES}")
    beside = f"beside {BASE}, of {', '.join(CANDIDATES)}; by default all but those by hand"
    parser.add_argument("--recipes", default=",".join(BY_DEFAULT), help=beside)
    parser.add_argument("--modes", default=",".join(MODES), help="of " + ", ".join(MODES))
    parser.add_argument("--reps", type=int, help=f"timed steps of each candidate; {REPS}")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which nothing new is begun")
    parser.add_argument("--one-thread", action="store_true", help=ONE_THREAD)
    parser.add_argument("--skip-guards", action="store_true", help="compile all candidates without any guards")
    parser.add_argument("--memory", default="default", choices=MEMORY_MODES, help="memory mode of ours")
    parser.add_argument("--profile", action="store_true", help="also profile each candidate: kernels and host")
    parser.add_argument("--small", action="store_true", help="tiny sizes, on the CPU: shows that everything runs")
    parser.add_argument("--backend", help="of torch.compile; inductor, with --small aot_eager")
    parser.add_argument("--json", help="write the numbers to this file, too, after each mode of a case")
    parser.add_argument("--markdown", help="write a page with the tables")
    parser.add_argument("--figure", help="draw the ratios to BF16 as a PNG; needs matplotlib")
    parser.add_argument("--load", metavar="JSON,...", help="measure nothing: show what earlier runs wrote")
    return parser


def load(paths: list[str]) -> Row:
    """Return what one run wrote, or several that each measured a part of it on machines of one kind.

    Each ratio is to BF16 of its own run; what two runs have measured is taken from the first.
    """
    first, *others = [json.loads(Path(path).read_text()) for path in paths]
    first["date"] = " and ".join(sorted({report["date"] for report in (first, *others)}))
    measured = {_what(row) for row in first["rows"]}
    for path, other in zip(paths[1:], others, strict=True):
        for key in ("device", "torch", "torchao", "backend", "reps", "one_thread", "skip_guards", "memory"):
            if other.get(key) != first.get(key):
                raise SystemExit(f"--load: {key} is {other.get(key)} in {path} and {first.get(key)} in {paths[0]}")
        first["rows"] += [row for row in other["rows"] if _what(row) not in measured]
        measured |= {_what(row) for row in other["rows"]}
        first["seconds"] += other["seconds"]
    return first


def _what(row: Row) -> tuple[str, ...]:
    return row["case"], row["mode"], row["candidate"]


def measure(args: argparse.Namespace) -> Row:
    """Return the report, or what there is of it when the budget ends or Ctrl-C comes."""
    if not args.small and not torch.cuda.is_available():
        raise SystemExit("PyTorch finds no CUDA GPU here: give --small for a run on the CPU that shows it works")
    device = "cpu" if args.small else "cuda"
    parts = _chosen("--parts", args.parts, PARTS)
    # CUDA graphs need a GPU.
    modes = [mode for mode in _chosen("--modes", args.modes, MODES) if device == "cuda" or mode != "graphs"]
    names = _chosen("--recipes", args.recipes, CANDIDATES)
    candidates = [found for name, found in CANDIDATES.items() if name in names or found.is_base]
    shapes = [_shape(text) for text in (args.shapes or (SMALL["shapes"] if args.small else SHAPES)).split(",")]
    cases = {
        "a": linear_cases(shapes, device),
        "b": llama_cases(SMALL["llama"] if args.small else LlamaSizes(), device),
        "d": expert_cases(*(SMALL["experts"] if args.small else (16384, 4096, 14336)), device),
    }
    begin = time.perf_counter()
    backend = args.backend or ("aot_eager" if args.small else "inductor")
    reps = args.reps or (1 if args.small else REPS)
    bench = Bench(device, backend, reps, begin + args.budget, args.skip_guards, args.memory, args.profile)
    report: Row = quantize.versions(device) | {
        "torchao": _version("torchao"),
        "date": datetime.date.today().isoformat(),
        "backend": backend,
        "reps": reps,
        "one_thread": args.one_thread,
        "skip_guards": args.skip_guards,
        "memory": args.memory,
        "rows": [],
    }
    try:
        for part in parts:
            for case in cases.get(part, []):
                if not any(text.strip() in case.name for text in args.cases.split(",")):
                    continue
                taken = [mode for mode in modes if mode != "graphs" or case.is_small]
                for mode, rows in zip(taken, bench.measure(case, taken, candidates), strict=True):
                    report["rows"] += rows
                    _save(report, args.json, begin, f"{part}: {case.name}, {mode}")
            if part == "c" and not bench.is_over():
                report["quantize"] = (
                    quantize.on_cpu((64, 128), torch.bfloat16, "amax", True)
                    if args.small
                    else quantize.on_cuda((16384, 14336), torch.bfloat16, None, True)
                )
                _save(report, args.json, begin, "c: quantization")
    except KeyboardInterrupt:
        print("stopped: this is what there is", file=sys.stderr)
    return report


def _version(name: str) -> str | None:
    """Return the version of a package that is installed, or "unknown" if it lies on the path
    without an installation's records."""
    if find_spec(name) is None:
        return None
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def _save(report: Row, path: str | None, begin: float, what: str) -> None:
    report["seconds"] = time.perf_counter() - begin
    print(f"{report['seconds']:6.0f} s  {what}", file=sys.stderr, flush=True)
    if path:
        Path(path).write_text(json.dumps(report, indent=1) + "\n")


def _chosen(option: str, text: str, known: Any) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise SystemExit(f"{option}: there is no {name!r}; give some of {', '.join(known)}")
    return names


def _shape(text: str) -> tuple[int, int, int]:
    sizes = text.strip().split("x")
    if len(sizes) != 3 or not all(size.isdigit() and int(size) for size in sizes):
        raise SystemExit(f"--shapes: {text!r} is no size; give tokens x in x out, as in 16384x4096x4096")
    m, k, n = map(int, sizes)
    return m, k, n
