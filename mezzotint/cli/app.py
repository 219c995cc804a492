"""This module defines the commands: which options each takes, and what its help says.

Nothing here imports torch, which takes seconds, so that help, usage errors and shell scripts do not wait for it. A
command imports the file of its name when it runs.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, TypeVar

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
    help="Train transformers in low precision (FP8, MXFP8, NVFP4) on PyTorch.",
    epilog="Begin with: mezzotint doctor",
    add_completion=False,
    pretty_exceptions_enable=False,
)
# This class is click's, or that of the copy of click which newer versions of typer carry.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]

Command = TypeVar("Command", bound=Callable[..., Any])
Out = Annotated[
    str | None,
    typer.Option(
        help="Write into this folder.", show_default="a new one under runs/", metavar="FOLDER", rich_help_panel="Run"
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        help=f"Begin with the sizes of {', '.join(MODELS)}, or of a JSON or TOML file.",
        show_default=MODEL,
        metavar="MODEL",
        rich_help_panel="Model",
    ),
]
Timeout = Annotated[
    int,
    typer.Option(
        min=1,
        max=10**6,
        help="Wait this many seconds for another rank before giving up.",
        metavar="N",
        rich_help_panel="Several ranks",
    ),
]
# Comparisons do not take these options of TrainConfig, because all recipes see all of the text.
ALONE_IN_TRAIN = ("rules", "hold_out", "eval_every", "eval_batches", "sample", "inspect", "what_if")
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.", metavar=" ")]


def command(name: str, *examples: str) -> Callable[[Command], Command]:
    """Make a command of a function: its docstring is the help, which ends with examples."""

    def decorate(function: Command) -> Command:
        # typer keeps line breaks, which would break the text where the source does.
        paragraphs = [" ".join(each.split()) for each in (function.__doc__ or "").split("\n\n")]
        shown = "\n".join(["Examples:", *(f"  mezzotint {each}" for each in examples)])
        app.command(name, help="\n\n".join(paragraphs), epilog=shown)(function)
        return function

    return decorate


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
    _: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the versions and exit.", callback=_show_version, is_eager=True, metavar=" "
        ),
    ] = False,
) -> None: ...


@command(
    "train",
    "train --recipe mxfp8",
    "train --recipe nvfp4 --model llama3.2-1b --data corpus --out runs/nv",
    "train --resume --out runs/nv",
    "train --recipe nvfp4 --inspect 50 --what-if",
    "train --hold-out 0.05 --eval-every 50 --sample 200",
)
@takes(ModelConfig, TrainConfig, Layout, without=("vocab", "world"))
def train(
    *,
    out: Out = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --out.", metavar=" ", rich_help_panel="Run")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Begin the run in --out anew.", metavar=" ", rich_help_panel="Run")
    ] = False,
    model: ModelOption = None,
    timeout: Timeout = 600,
    given: dict[str, Any],
) -> None:
    """Train a Llama-like language model on text that is on this machine.

    Ctrl-C stops after a step, with a checkpoint; --resume goes on from the last one.

    Start it with torchrun to train on several ranks (processes that train together), where each replica has a batch of
    its own: torchrun --nproc-per-node 8 -m mezzotint train --tp 2 --fsdp
    """
    options = {"out": out, "resume": resume, "overwrite": overwrite, "model": model, "timeout": timeout}
    _file("train").run_train(**options, given=given)


@command(
    "compare",
    "compare",
    "compare --recipes bf16,delayed,mxfp8 --steps 500",
    "compare --recipes mxfp8,nvfp4 --seeds 3",
)
@takes(ModelConfig, TrainConfig, without=("vocab", "recipe", "checkpoint_every", "keep", *ALONE_IN_TRAIN))
def compare(
    *,
    recipes: Annotated[
        str,
        typer.Option(
            help="Train in these recipes, separated by commas, or in all; BF16 always runs.",
            metavar="RECIPES",
            rich_help_panel="Recipe",
        ),
    ] = "bf16,delayed,current,mxfp8,nvfp4",
    seeds: Annotated[
        int,
        typer.Option(
            min=1,
            max=100,
            help="Run BF16 with this many seeds, --seed and the next ones; two or more show which gaps are chance.",
            metavar="N",
            rich_help_panel="Recipe",
        ),
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


@command("doctor", "doctor", "doctor --device cpu --no-compile", "doctor --json > doctor.json")
def doctor(
    device: Annotated[
        str, typer.Option(help="Look at cpu or cuda; auto takes a GPU if there is one.", metavar="DEVICE")
    ] = "auto",
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Check compiled code, too.", metavar=" ")
    ] = True,
    as_json: Json = False,
) -> None:
    """Say what runs natively here, emulated or as reference, check every recipe, and say what to do next.

    The exit status is 1 if a recipe is wrong.
    """
    raise typer.Exit(_file("doctor").run_doctor(device, compiled, as_json))


@command("inspect", "inspect runs/train-001", "inspect runs/train-001 --out page.html")
def show_inspected(
    run: Annotated[str, typer.Argument(help="The folder of a run that was trained with --inspect.", metavar="RUN")],
    out: Annotated[
        str | None,
        typer.Option(help="Write the page into this file.", show_default="inspect.html in RUN", metavar="FILE"),
    ] = None,
) -> None:
    """Write a page that shows what quantization did to the tensors of RUN: one HTML file, for any browser."""
    _file("inspect").run_inspect(run, out)


@command(
    "suggest",
    "suggest runs/train-001 --min-snr 20",
    "suggest runs/train-001 --budget 5% --recipes mxfp8,bf16 --out rules.toml",
)
def suggest(
    run: Annotated[
        str,
        typer.Argument(help="The folder of a run that was trained with --inspect, best with --what-if.", metavar="RUN"),
    ],
    *,
    min_snr: Annotated[
        float | None,
        typer.Option(
            help="Let no tensor have a signal-to-noise ratio below this many dB; without --budget, 20.", metavar="X"
        ),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Let matrix products take this much more time, such as 5%.", metavar="PERCENT")
    ] = None,
    recipes: Annotated[
        str, typer.Option(help="Move layers to these recipes, separated by commas, or to all.", metavar="RECIPES")
    ] = "all",
    recipe: Annotated[
        str | None,
        typer.Option(help="Name the recipe of the run, where its folder does not.", metavar="RECIPE"),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(help="Write the rules into this file.", show_default="rules.toml in RUN", metavar="FILE"),
    ] = None,
) -> None:
    """Say which layers of RUN to keep in higher precision, and write rules that `mezzotint train --rules` takes."""
    options = {"out": out, "recipe": recipe, "recipes": recipes, "min_snr": min_snr, "budget": budget}
    _file("suggest").run_suggest(run=run, **options)


@command(
    "plan",
    "plan llama3-8b --batch 2",
    "plan config.json --batch 1 --sequence 4096 --recipes bf16,nvfp4",
    "plan llama3-8b --quantized-weights --recompute --fits 80GB",
    "plan llama3-70b --world 1024 --tp 8 --fsdp",
)
@takes(ModelConfig, Savings, Layout, changing=ModelConfig)
def plan(
    model: Annotated[str, typer.Argument(help=f"One of {', '.join(MODELS)}, or a JSON or TOML file.", metavar="MODEL")],
    *,
    recipes: Annotated[
        str,
        typer.Option(
            help="Plan for these recipes, separated by commas, or for all.", metavar="RECIPES", rich_help_panel="Recipe"
        ),
    ] = "all",
    rules: Annotated[
        str | None,
        typer.Option(
            help="Plan for the rules per layer in this TOML file; give it or --recipes.",
            metavar="FILE",
            rich_help_panel="Recipe",
        ),
    ] = None,
    params_dtype: Annotated[
        str, typer.Option(help="Hold parameters in float32 or bfloat16.", metavar="DTYPE", rich_help_panel="Memory")
    ] = "float32",
    fits: Annotated[
        str | None,
        typer.Option(
            help="Say what fits into this much memory, such as 80GB; the exit status is 1 if a recipe does not.",
            metavar="SIZE",
            rich_help_panel="Memory",
        ),
    ] = None,
    as_json: Json = False,
    given: dict[str, Any],
) -> None:
    """Print the parameters and the memory of one training step of MODEL, recipe by recipe, on any machine.

    The real modules run on tensors without data, in eager mode; options change sizes of MODEL. With --world, the plan
    is what one of many ranks holds, and what it sends.
    """
    options = {"recipes": recipes, "rules": rules, "params_dtype": params_dtype, "fits": fits, "as_json": as_json}
    raise typer.Exit(_file("plan").run_plan(model=model, **options, given=given))


@command(
    "export",
    "export runs/train-001 served --to compressed-tensors",
    "export checkpoint/ served --to hf-fp8 --recipe block --dtype bfloat16",
)
def write_published(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="A run, one of its checkpoints, or a model's folder as Hugging Face has it.", metavar="CHECKPOINT"
        ),
    ],
    out: Annotated[str, typer.Argument(help="The folder that is written.", metavar="OUT")],
    *,
    to: Annotated[
        str,
        typer.Option(
            help="Write hf-fp8, modelopt-nvfp4, mxfp4 (that of gpt-oss) or compressed-tensors. The last takes the "
            "format of training, or the one that its name ends in: -fp8, -fp8-tensor, -mxfp8, -mxfp4 or -nvfp4.",
            metavar="FORMAT",
        ),
    ],
    recipe: Annotated[
        str | None,
        typer.Option(
            help="Quantize the weights by this recipe.", show_default="as they were trained", metavar="RECIPE"
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Cast tensors that are not quantized to float32, float16 or bfloat16.", metavar="DTYPE"),
    ] = None,
    requantize: Annotated[
        bool,
        typer.Option(
            "--requantize", help="Allow other blocks than those of training, where they cannot be kept.", metavar=" "
        ),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT.", metavar=" ")] = False,
    shard_mb: Annotated[
        int, typer.Option(min=1, max=10**6, help="Write files of weights of at most N megabytes.", metavar="N")
    ] = 5000,
) -> None:
    """Write a checkpoint in a low-precision format that other programs serve; OUT appears when it is complete."""
    _file("export").run_export(checkpoint, to, out, recipe, dtype, requantize, overwrite, shard_mb)


@command("verify", "verify runs/train-001 served", "verify served copy --json")
def compare_published(
    first: Annotated[str, typer.Argument(help="A run, a checkpoint, or an export.", metavar="FIRST")],
    second: Annotated[str, typer.Argument(help="An export.", metavar="SECOND")],
    as_json: Json = False,
) -> None:
    """Check that SECOND is what FIRST becomes: every code and scale is computed again.

    The exit status is 1 if one differs.
    """
    raise typer.Exit(_file("verify").run_verify(first, second, as_json))


# All options, --help among them, are passed on to the measurement.
app.command(add_help_option=False, context_settings={"ignore_unknown_options": True})(bench)
