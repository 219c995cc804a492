"""Settings said once: a field of a dataclass is a command's option, a line of `config.json`, and a value of the run.

@dataclass(frozen=True, kw_only=True)
class Config:
    steps: int = option(200, "optimizer steps")

@app.command()
@takes(Config)
def train(out: str, given: dict[str, Any]) -> None: ...        --out, --steps; given: what was given of Config
"""

import inspect
from collections.abc import Callable
from dataclasses import Field, field, fields
from functools import wraps
from typing import Any

import typer

from mezzotint.cli.console import CommandError


def option(default: Any, help: str, *, at_least: float | None = None, may_change: bool = False) -> Any:
    """A field with its help. `may_change`: a resumed run takes another value than the one it began with."""
    return field(default=default, metadata={"help": help, "at_least": at_least, "may_change": may_change})


def flag(name: str) -> str:
    """kv_heads → "--kv-heads"."""
    return f"--{name.replace('_', '-')}"


def check(config: Any) -> None:
    """Lower bounds of the fields."""
    for entry in fields(config):
        least, value = entry.metadata.get("at_least"), getattr(config, entry.name)
        if least is not None and value is not None and not value >= least:  # not of NaN, either
            raise CommandError(f"{flag(entry.name)} is {value}: give {least} or more")


def takes(
    *configs: type, without: tuple[str, ...] = (), changing: type | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The command's parameter `given` becomes an option for each field. What was left out is not in it, so that a
    command can tell a default from a choice. Fields of `changing` change one that the command has from elsewhere: their
    defaults are not shown."""
    options = {entry.name: entry for config in configs for entry in fields(config) if entry.name not in without}
    silent = set() if changing is None else {entry.name for entry in fields(changing)}

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(command)

        @wraps(command)
        def run(**values: Any) -> Any:
            found = {name: values.pop(name) for name in options}
            return command(**values, given={name: value for name, value in found.items() if value is not None})

        parameters = [parameter for name, parameter in own.parameters.items() if name != "given"]
        parameters += [_parameter(entry, shows=name not in silent) for name, entry in options.items()]
        run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _parameter(entry: Field, *, shows: bool) -> inspect.Parameter:
    default = entry.default
    if isinstance(default, bool):
        default = flag(entry.name if default else f"no-{entry.name}")
    shown = f" ({default})" if shows and default is not None else ""
    kind: Any = entry.type
    return inspect.Parameter(
        entry.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=typer.Option(None, help=f"{entry.metadata['help']}{shown}", show_default=False),
        annotation=kind | None,
    )
