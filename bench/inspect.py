"""Inspection: measure what an inspector costs, in a training step of some layers, and what one look in 50 steps adds.

    python -m bench inspect [--device cuda] [--recipe mxfp8] [--hidden 2048] [--tokens 8192] [--layers 2] [--what-if]
                            [--no-compile] [--repeat 10] [--json out.json]

Times are wall-clock medians of whole training steps: forward, backward and the optimizer's. Those of inspected steps
include writing the measurements.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import mezzotint as mz

EVERY = 50


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench inspect", description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--recipe", default="mxfp8")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=10, help="steps of each kind")
    parser.add_argument("--what-if", action="store_true", help="try other formats, too")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--json", help="also write the figures here")
    args = parser.parse_args(argv)
    report = measure(args)
    Console().print(
        f"{args.recipe}, {args.layers} layers of {args.hidden}, {args.tokens} tokens, {args.device}: a step "
        f"{report['plain_ms']:.2f} ms, inspected {report['inspected_ms']:.2f} ms; every {EVERY} steps "
        f"{100 * report['overhead']:.2f} % more",
        highlight=False,
    )
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the median milliseconds of both kinds of steps, and the share that one inspected step in 50 adds."""
    torch.manual_seed(0)
    options = {"params_dtype": torch.bfloat16, "device": args.device, "normalization": "RMSNorm", "bias": False}
    layer = {"num_attention_heads": max(1, args.hidden // 128), "activation": "swiglu", **options}
    layers = [mz.TransformerLayer(args.hidden, 4 * args.hidden, **layer) for _ in range(args.layers)]
    model = torch.nn.Sequential(*layers)
    called = model if args.no_compile else torch.compile(model, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=args.device == "cuda")
    x = torch.randn(args.tokens, 1, args.hidden, device=args.device, dtype=torch.bfloat16)

    def step() -> None:
        with mz.autocast(args.recipe):
            y = called(x)
        y.backward(x)
        optimizer.step()
        optimizer.zero_grad()

    times: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as out:
        inspector = mz.inspect(model, every=2, out=out, what_if=args.what_if)
        for _ in range(2 * (args.repeat + 2)):
            is_inspected = inspector.is_inspected
            _wait(args.device)
            start = time.perf_counter()
            with inspector:
                step()
            _wait(args.device)
            times[is_inspected].append(1e3 * (time.perf_counter() - start))
    plain, inspected = [statistics.median(times[kind][2:]) for kind in (False, True)]
    overhead = (inspected - plain) / (EVERY * plain)
    return {**vars(args), "plain_ms": plain, "inspected_ms": inspected, "overhead": overhead}


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
