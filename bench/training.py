"""Training: compare the loss of a tiny language model, step by step, in every recipe.

    python -m bench training [--steps 200] [--recipes none,mxfp8] [--seed 0] [--device cpu|cuda] [--compile [BACKEND]]
                             [--json out.json] [--plot out.png]

The model is bytes → embedding → 2 × (x + proj(attention(LayerNormLinear(x))), then x + LayerNormMLP(x)) → norm → head.
Parameters are FP32, activations BF16; embedding, attention, norm and head are never quantized. The text is sentences
from a small grammar. Every recipe starts from the same weights and sees the same batches, so what differs is the
quantization. "none, nudged" is BF16 once more from weights that differ by about a millionth: it shows how large a gap
is that means nothing. After 200 steps or more the exit status is 1 if a recipe is farther from BF16 than `DISTANCE`.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn
from torch.nn import functional

import mezzotint as mz
from mezzotint import recipe
from mezzotint.recipe import Recipe

RECIPES: dict[str, Recipe | None] = {
    "none": None,
    "delayed": recipe.DelayedScaling(),
    "current": recipe.Float8CurrentScaling(),
    "rowwise": recipe.Float8RowwiseScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
    "custom": recipe.CustomRecipe(mz.custom_recipes.nvfp4_forward_mxfp8_backward_factory),
}
BASE = "none"  # BF16
NUDGED, NUDGE = "none, nudged", 1e-6
STEPS = 200
# The loss may be this far from BF16's after STEPS, in nats a byte: about twice what three
# seeds show (docs/training.md).
FP8_DISTANCE, FP4_DISTANCE = 0.01, 0.02
DISTANCE = {name: FP4_DISTANCE if name in ("nvfp4", "custom") else FP8_DISTANCE for name in (*RECIPES, NUDGED)}
WARMUP = 20  # steps of a rising learning rate; then it falls in a straight line to 0
LAST = 20  # steps that the final loss is the mean of
VOCABULARY = 256
# These are Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = dict(
    zip(RECIPES, ("black", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7"), strict=True)
) | {NUDGED: "#AAAAAA"}

WORDS = {
    "who": ("anna", "boris", "clara", "david", "elena", "felix", "greta", "henry"),
    "colour": ("red", "green", "blue", "white", "black", "yellow"),
    "thing": ("apple", "basket", "candle", "drum", "engine", "feather", "glove", "hammer", "kettle", "ladder"),
    "place": ("kitchen", "garden", "tower", "harbour", "library"),
}
# A slot that comes twice is the same word twice: the second one can be known from the first.
SENTENCES = (
    "{who} took the {colour} {thing} to the {place}. now the {thing} is in the {place}.\n",
    "in the {place} {who} lost a {thing}. {who} looks for the {colour} {thing}.\n",
    "{who} has a {colour} {thing}. the {thing} of {who} is {colour}.\n",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A `Sizes` says what is trained, and on how much."""

    hidden: int = 128
    ffn: int = 256
    heads: int = 4
    layers: int = 2
    sequence: int = 64
    batch: int = 8
    learning_rate: float = 2e-3


@dataclass(frozen=True, slots=True)
class Run:
    """A `Run` is the result of one recipe's training."""

    name: str
    losses: list[float]
    seconds: float

    @property
    def final(self) -> float:
        return statistics.fmean(self.losses[-LAST:])


class Block(nn.Module):
    """A `Block` applies attention, then SwiGLU, each added to its input: x (B, S, H),
    bias (heads, S, S) → (B, S, H)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        options: dict[str, Any] = {"normalization": "RMSNorm", "bias": False, "device": "cpu"}
        self.heads = sizes.heads
        self.qkv = mz.LayerNormLinear(sizes.hidden, 3 * sizes.hidden, **options)
        self.proj = mz.Linear(sizes.hidden, sizes.hidden, bias=False, device="cpu")
        self.mlp = mz.LayerNormMLP(sizes.hidden, sizes.ffn, activation="swiglu", **options)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x + self.proj(y.transpose(1, 2).reshape(b, s, h))
        return x + self.mlp(x)


class LanguageModel(nn.Module):
    """A `LanguageModel` maps tokens int64 (B, S) to logits FP32 (B, S, 256); it is made on the CPU, so that a seed
    gives the same weights anywhere."""

    attention_bias: torch.Tensor  # BF16 (heads, S, S)

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, sizes.hidden)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList([Block(sizes) for _ in range(sizes.layers)])
        self.norm = mz.RMSNorm(sizes.hidden, device="cpu")
        self.head = nn.Linear(sizes.hidden, VOCABULARY, bias=False)
        self.register_buffer("attention_bias", distance_bias(sizes), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens).to(torch.bfloat16)
        for block in self.blocks:
            x = block(x, self.attention_bias)
        return self.head(self.norm(x).float())


def distance_bias(sizes: Sizes) -> torch.Tensor:
    """Return the bias of attention, BF16 (heads, S, S): -distance · 2^-head, and -∞ for later tokens.

    Heads that look near from the start learn to spell in tens of steps. With learnt positions the loss waits on a
    plateau, and when it leaves that is more chance than precision.
    """
    place = torch.arange(sizes.sequence)
    distance = (place[:, None] - place[None, :]).float()
    slopes = 2.0 ** -torch.arange(sizes.heads)
    return torch.where(distance < 0, -torch.inf, -distance * slopes[:, None, None]).to(torch.bfloat16)


def make_text(seed: int, length: int) -> bytes:
    """Return sentences of the grammar; of Python's generators only `random()` is promised to stay as it is."""
    generator = random.Random(seed)

    def pick(options: Sequence[str]) -> str:
        return options[int(generator.random() * len(options))]

    text = ""
    while len(text) < length:
        text += pick(SENTENCES).format(**{slot: pick(words) for slot, words in WORDS.items()})
    return text[:length].encode()


def make_batches(sizes: Sizes, steps: int, seed: int) -> list[torch.Tensor]:
    """Return `steps` tensors int64 (B, S + 1): consecutive pieces of one text, each seen once."""
    width = sizes.sequence + 1
    text = torch.frombuffer(bytearray(make_text(seed, steps * sizes.batch * width)), dtype=torch.uint8)
    return list(text.long().view(steps, sizes.batch, width))


def train(
    name: str,
    batches: Sequence[torch.Tensor],
    sizes: Sizes,
    *,
    seed: int = 0,
    device: str = "cpu",
    backend: str | None = None,
    advance: Callable[[], None] = lambda: None,
) -> Run:
    """Train a new model in one recipe, one step for each batch, compiled whole if `backend` is given."""
    torch.manual_seed(seed)  # for weights, and for NVFP4's stochastic rounding
    model = LanguageModel(sizes)
    if name == NUDGED:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + NUDGE * torch.randn_like(parameter))
    model.to(device)
    call: Any = model
    if backend is not None:
        torch.compiler.reset()  # recipes share the model's code, and the graphs of one function are limited
        call = torch.compile(model, fullgraph=True, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=sizes.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    chosen, losses = RECIPES.get(name), []
    start = time.perf_counter()
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = sizes.learning_rate * min((step + 1) / WARMUP, 1 - step / len(batches))
        tokens = batch.to(device)
        with mz.autocast(enabled=chosen is not None, recipe=chosen):
            logits = call(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        advance()
    return Run(name, losses, time.perf_counter() - start)


def run_all(
    names: Sequence[str], steps: int, sizes: Sizes, *, seed: int = 0, device: str = "cpu", backend: str | None = None
) -> list[Run]:
    """Train in BF16 first, as it is and nudged, then in the others, on the same batches."""
    names = [BASE, NUDGED, *(name for name in names if name != BASE)]
    batches = make_batches(sizes, steps, seed)
    with Progress(transient=True, disable=not Console().is_terminal) as progress:
        runs = []
        for name in names:
            task = progress.add_task(name, total=steps)
            advance = partial(progress.advance, task)
            runs.append(train(name, batches, sizes, seed=seed, device=device, backend=backend, advance=advance))
    return runs


def gap(run: Run, runs: Sequence[Run]) -> float:
    """Return by how much a run's final loss is larger than BF16's."""
    return run.final - runs[0].final


def main(argv: list[str] | None = None) -> int:
    """Train, print, and write and draw if asked; return 1 if a recipe is too far from BF16."""
    parser = argparse.ArgumentParser(prog="python -m bench training", description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--recipes", default=",".join(RECIPES), help=f"of {', '.join(RECIPES)}; {BASE} always runs")
    parser.add_argument("--seed", type=int, default=0, help="of weights, text and stochastic rounding")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--compile", nargs="?", const="inductor", metavar="BACKEND", help="torch.compile, fullgraph")
    parser.add_argument("--json", type=Path, help="also write every loss here")
    parser.add_argument("--plot", type=Path, help="also draw the losses here; needs matplotlib")
    args = parser.parse_args(argv)
    names = args.recipes.split(",")
    for name in names:
        if name not in RECIPES:
            parser.error(f"--recipes: there is no {name!r}; give some of {', '.join(RECIPES)}")
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: give 1 or more")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no CUDA GPU here")
    if args.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    if args.device == "cpu":
        torch.set_num_threads(1)  # such small operators gain little from more threads, and wait long for a busy one
    sizes = Sizes()
    runs = run_all(names, args.steps, sizes, seed=args.seed, device=args.device, backend=args.compile)
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU, one thread"
    how = "eager" if args.compile is None else f"compiled, {args.compile}"
    title = f"{args.steps} steps, seed {args.seed}, {how}: {where}, torch {torch.__version__}"
    allowed = DISTANCE if args.steps >= STEPS else {}  # before that the gaps are larger
    Console(width=None if Console().is_terminal else 120).print(as_table(runs, title, allowed))
    if args.json:
        args.json.write_text(json.dumps(as_report(runs, title, sizes), indent=1) + "\n")
    if args.plot:
        plot(runs, title, args.plot)
    is_near = [abs(gap(run, runs)) <= allowed.get(run.name, torch.inf) for run in runs]  # NaN is not near
    return 0 if all(is_near) else 1


def as_table(runs: Sequence[Run], title: str, allowed: dict[str, float]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("recipe")
    for name in ("first loss", f"mean of last {min(LAST, len(runs[0].losses))}", "gap to BF16", "allowed", "seconds"):
        table.add_column(name, justify="right")
    for run in runs:
        is_base = run.name == BASE
        away = "" if is_base else f"{gap(run, runs):+.4f}"
        limit = "" if is_base or not allowed else f"{allowed[run.name]:.2f}"
        label = f"{run.name} (BF16)" if is_base else run.name
        table.add_row(label, f"{run.losses[0]:.4f}", f"{run.final:.4f}", away, limit, f"{run.seconds:.1f}")
    return table


def as_report(runs: Sequence[Run], title: str, sizes: Sizes) -> dict[str, Any]:
    rows = [{**asdict(run), "final": run.final, "gap": gap(run, runs)} for run in runs]
    return {"title": title, "sizes": asdict(sizes), "last": LAST, "runs": rows}


def plot(runs: Sequence[Run], title: str, path: Path) -> None:
    """Draw two panels: the losses, and their running means less BF16's."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"font.size": 8, "axes.titlesize": 8, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(7.5, 3), dpi=100, layout="constrained")
        figure.suptitle(title, fontsize=8)
        left, right = figure.subplots(1, 2)
        base = running_mean(runs[0].losses)
        for run in runs:
            colour = COLOURS[run.name]
            left.plot(run.losses, color=colour, linewidth=0.9, label=run.name)
            if run.name != BASE:
                away = [a - b for a, b in zip(running_mean(run.losses), base, strict=True)]
                right.plot(range(LAST - 1, len(run.losses)), away, color=colour, linewidth=0.9)
        left.set(title="loss", xlabel="step", ylabel="nats a byte", yscale="log")
        left.set_yticks([0.3, 0.5, 1, 2, 5], ["0.3", "0.5", "1", "2", "5"])
        left.minorticks_off()
        left.legend(frameon=False, ncols=2)
        right.axhline(0, color=COLOURS[BASE], linewidth=0.9)
        right.set(title=f"gap to BF16, running mean of {LAST} steps", xlabel="step", ylabel="nats a byte")
        figure.savefig(path)


def running_mean(losses: Sequence[float]) -> list[float]:
    """Return the means of LAST consecutive values each."""
    return [statistics.fmean(losses[i : i + LAST]) for i in range(len(losses) - LAST + 1)]
