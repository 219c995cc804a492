"""The commands, put together."""

import typer

from mezzotint.cli.bench import bench
from mezzotint.cli.compare import compare
from mezzotint.cli.doctor import doctor
from mezzotint.cli.plan import plan
from mezzotint.cli.train import train

app = typer.Typer(
    help="Low-precision training (FP8, MXFP8, NVFP4) on PyTorch.", add_completion=False, pretty_exceptions_enable=False
)
for command in (train, compare, doctor, plan):
    app.command()(command)
# Options, --help among them, are those of the measurement.
app.command(add_help_option=False, context_settings={"ignore_unknown_options": True})(bench)

# Of click, or of the copy of it that newer versions of typer carry.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]
