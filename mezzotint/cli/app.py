"""This module defines the commands: which options each takes, and what its help says.

Nothing here imports torch, which takes seconds, so that help, usage errors and shell scripts do not wait for it. A
command imports the file of its name when it runs.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer

from mezzotint.cli.bench import bench
from mezzotint.cli.extra import what_to_install
from mezzotint.trainer.console import CommandError
from mezzotint.trainer.layout import Layout
from mezzotint.trainer.options import takes
from mezzotint.trainer.savings import Savings
from mezzotint.trainer.settings import TrainConfig
from mezzotint.trainer.sizes import MODEL, MODELS, ModelConfig

app = typer.Typer(
    help="Low-precision training (FP8, MXFP8, NVFP4) on PyTorch.", add_completion=False, pretty_exceptions_enable=False
)
# This class is click's, or that of the copy of click which newer versions of typer carry.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]

Out = Annotated[str | None, typer.Option(help="folder of the run", show_default="a new one under runs/")]
ModelOption = Annotated[
    str | None,
    typer.Option(help=f"sizes to begin with, as `mezzotint plan` takes them ({MODEL})", show_default=False),
]
Timeout = Annotated[int, typer.Option(min=1, max=10**6, help="seconds that one of many processes waits for another")]
# Comparisons do not take these options of TrainConfig, because all recipes see all of the text.
ALONE_IN_TRAIN = ("rules", "hold_out", "eval_every", "eval_batches", "sample", "inspect", "what_if")
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


def _file(name: str) -> Any:
    """Return the module of a command, after importing what `import mezzotint` registers."""
    import_module("mezzotint.api")
    try:
        return import_module(f"mezzotint.cli.{name}")
    except ModuleNotFoundError as error:
        raise CommandError(what_to_install(error)) from None


def _show_version(asked: bool) -> None:
    if asked:
        for name in ("mezzotint", "torch"):
            try:
                typer.echo(f"{name} {version(name)}")
            except PackageNotFoundError:
                typer.echo(f"{name} is not installed")
        raise typer.Exit


@app.callback()
def program(
    _: Annotated[bool, typer.Option("--version", help="print versions", callback=_show_version, is_eager=True)] = False,
) -> None: ...


@app.command()
@takes(ModelConfig, TrainConfig, Layout, without=("vocab", "world"))
def train(
    *,
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the run in --out")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="begin the run in --out anew")] = False,
    model: ModelOption = None,
    timeout: Timeout = 600,
    given: dict[str, Any],
) -> None:
    """Train a Llama-like language model on text that is on this machine.

    Ctrl-C stops after a step, with a checkpoint; `--resume` goes on from the last one. Several processes train
    together, each replica with a batch of its own: torchrun --nproc-per-node 8 -m mezzotint train --tp 2 --fsdp
    """
    options = {"out": out, "resume": resume, "overwrite": overwrite, "model": model, "timeout": timeout}
    _file("train").run_train(**options, given=given)


@app.command()
@takes(ModelConfig, TrainConfig, without=("vocab", "recipe", "checkpoint_every", "keep", *ALONE_IN_TRAIN))
def compare(
    *,
    recipes: Annotated[
        str, typer.Option(help="recipes between commas, or all; BF16 always runs")
    ] = "bf16,delayed,current,mxfp8,nvfp4",
    seeds: Annotated[
        int, typer.Option(min=1, max=100, help="runs of BF16, of --seed and the next ones: several show what is chance")
    ] = 1,
    out: Out = None,
    model: ModelOption = None,
    given: dict[str, Any],
) -> None:
    """Train in several recipes, print a table, and draw the losses and their gaps to BF16.

    With --seeds 3 BF16 runs with three seeds. The distance between the lowest and the highest of their losses is the
    band of chance: it is drawn, and a gap that is no larger is reported as within chance.
    """
    _file("compare").run_compare(recipes=recipes, seeds=seeds, out=out, model=model, given=given)


@app.command()
def doctor(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="check compiled code, too")] = True,
    as_json: Json = False,
) -> None:
    """Say what runs natively here, emulated or as reference, and check every recipe; exit with 1 if one is wrong."""
    raise typer.Exit(_file("doctor").run_doctor(device, compiled, as_json))


@app.command("inspect")
def show_inspected(
    run: Annotated[str, typer.Argument(help="folder of a run that was trained with --inspect")],
    out: Annotated[str | None, typer.Option(help="file of the page", show_default="inspect.html in RUN")] = None,
) -> None:
    """Write a page that shows what quantization did to the tensors of RUN: one HTML file, for any browser."""
    _file("inspect").run_inspect(run, out)


@app.command()
def suggest(
    run: Annotated[str, typer.Argument(help="folder of a run that was trained with --inspect, best with --what-if")],
    *,
    min_snr: Annotated[
        float | None, typer.Option(help="dB that no tensor may be below (20 where there is no --budget)")
    ] = None,
    budget: Annotated[str | None, typer.Option(help="time that matrix products may take more, as 5%")] = None,
    recipes: Annotated[str, typer.Option(help="what layers may move to, between commas, or all")] = "all",
    recipe: Annotated[str | None, typer.Option(help="that of the run, where its folder does not say it")] = None,
    out: Annotated[str | None, typer.Option(help="file of the rules", show_default="rules.toml in RUN")] = None,
) -> None:
    """Say which layers of RUN to keep in higher precision, and write rules that `mezzotint train --rules` takes."""
    options = {"out": out, "recipe": recipe, "recipes": recipes, "min_snr": min_snr, "budget": budget}
    _file("suggest").run_suggest(run=run, **options)


@app.command()
@takes(ModelConfig, Savings, Layout, changing=ModelConfig)
def plan(
    model: Annotated[str, typer.Argument(help=f"{', '.join(MODELS)}, or a JSON or TOML file")],
    *,
    recipes: Annotated[str, typer.Option(help="recipes between commas, or all")] = "all",
    rules: Annotated[str | None, typer.Option(help="TOML file of rules per layer, in the place of recipes")] = None,
    params_dtype: Annotated[str, typer.Option(help="of parameters: float32 or bfloat16")] = "float32",
    fits: Annotated[str | None, typer.Option(help="memory that there is, as 80GB; 1 where a recipe needs more")] = None,
    as_json: Json = False,
    given: dict[str, Any],
) -> None:
    """Print the parameters and the memory of one training step of MODEL, recipe by recipe, on any machine.

    The real modules run on tensors without data, in eager mode; options change sizes of MODEL. With --world, the plan
    is what one of many processes holds, and what it sends.
    """
    options = {"recipes": recipes, "rules": rules, "params_dtype": params_dtype, "fits": fits, "as_json": as_json}
    raise typer.Exit(_file("plan").run_plan(model=model, **options, given=given))


@app.command("export")
def write_published(
    checkpoint: Annotated[str, typer.Argument(help="a run, one of its checkpoints, or a folder of Hugging Face's")],
    out: Annotated[str, typer.Argument(help="folder that is written")],
    *,
    to: Annotated[
        str,
        typer.Option(
            help="hf-fp8, modelopt-nvfp4, mxfp4 (gpt-oss), or compressed-tensors with -fp8, -fp8-tensor, -mxfp8, "
            "-mxfp4 or -nvfp4; without: as it was trained"
        ),
    ],
    recipe: Annotated[
        str | None, typer.Option(help="what quantizes the weights", show_default="as they were trained")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="of tensors that are not quantized: float32, float16 or bfloat16")
    ] = None,
    requantize: Annotated[
        bool, typer.Option("--requantize", help="allow other blocks than those of training, where they cannot be kept")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace OUT")] = False,
    shard_mb: Annotated[int, typer.Option(min=1, max=10**6, help="largest file of weights, in megabytes")] = 5000,
) -> None:
    """Write a checkpoint in a low-precision format that other programs serve; OUT appears when it is complete."""
    _file("export").run_export(checkpoint, to, out, recipe, dtype, requantize, overwrite, shard_mb)


@app.command("verify")
def compare_published(
    first: Annotated[str, typer.Argument(help="a run, a checkpoint, or an export")],
    second: Annotated[str, typer.Argument(help="an export")],
    as_json: Json = False,
) -> None:
    """Check that SECOND is what FIRST becomes: every code and scale is computed again; exit with 1 if one differs."""
    raise typer.Exit(_file("verify").run_verify(first, second, as_json))


# All options, --help among them, are passed on to the measurement.
app.command(add_help_option=False, context_settings={"ignore_unknown_options": True})(bench)
