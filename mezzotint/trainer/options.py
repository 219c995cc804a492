"""Settings are declared once: a field of a dataclass is an option of a command, a line of
`config.json`, and a value of the run.

    @dataclass(frozen=True, kw_only=True)
    class Config:
        steps: int = option(200, "Train for this many steps.", panel="Optimization")

    @app.command()
    @takes(Config)
    def train(out: str, given: dict[str, Any]) -> None: ...    --out, --steps; given: what was given of Config
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import Field, field, fields
from functools import wraps
from typing import Any

import typer

from mezzotint.trainer.console import CommandError

# How help shows a value of this type. A switch takes none.
METAVARS: dict[Any, str] = {int: "N", int | None: "N", float: "X", bool: " "}


def option(
    default: Any,
    help: str,
    *,
    panel: str,
    metavar: str | None = None,
    is_switch: bool = False,
    at_least: float | None = None,
    bits: int = 31,
    may_change: bool = False,
) -> Any:
    """Return a field with its help text, which is a sentence.

    The help of a command shows options of one `panel` together, and `metavar` for a value; without it, N for an integer
    and X for a number. A flag that `is_switch` has no --no- form. An integer must be less than 2^`bits`, and a number
    `at_least` so large. `may_change` lets a resumed run take another value than the one it began with.
    """
    shown = {"help": help, "panel": panel, "metavar": metavar, "is_switch": is_switch}
    return field(default=default, metadata={**shown, "at_least": at_least, "bits": bits, "may_change": may_change})


def flag(name: str) -> str:
    """Return the option's name on the command line: kv_heads → "--kv-heads"."""
    return f"--{name.replace('_', '-')}"


def check_options(config: Any) -> None:
    """Raise a `CommandError` if a field has the wrong type or is out of bounds, wherever its value is from."""
    for entry in fields(config):
        value, least, bits = getattr(config, entry.name), entry.metadata["at_least"], entry.metadata["bits"]
        if not is_a(value, entry.type):
            raise CommandError(f"{flag(entry.name)} is {value!r}: give {words(entry.type)}")
        if isinstance(value, float) and not math.isfinite(value):
            raise CommandError(f"{flag(entry.name)} is {value}: give a finite number")
        if least is not None and value is not None and value < least:
            raise CommandError(f"{flag(entry.name)} is {value}: give {least} or more")
        if isinstance(value, int) and value >= 2**bits:
            raise CommandError(f"{flag(entry.name)} is {_short(value)}: give less than 2^{bits}")


def check_word(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise a `CommandError` if an option has another value than one of `choices`."""
    if value not in choices:
        raise CommandError(f"{flag(name)} is {value!r}: give one of {', '.join(choices)}")


def is_a(value: Any, kind: Any) -> bool:
    """Return whether a value is of this type; an integer is also a `float`, and True is neither."""
    if kind is float:
        kind = int | float
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def words(kind: Any) -> str:
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    return names.get(kind, "text" if isinstance("", kind) else "an integer")


def _short(number: int) -> str:
    """Return an integer in few characters: Python refuses to print thousands of digits."""
    return str(number) if number < 10**20 else f"{float(number):.1e}" if number < 10**300 else "more than 1e300"


def takes(
    *configs: type, without: tuple[str, ...] = (), changing: type | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command an option for each field of `configs`, in the place of its parameter `given`.

    `given` has only the options that were given, so that a command can tell a default from a choice. The fields of
    `changing` change a configuration that the command has from elsewhere, so their defaults are not shown.
    """
    options = {entry.name: entry for config in configs for entry in fields(config) if entry.name not in without}
    silent = set() if changing is None else {entry.name for entry in fields(changing)}

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(command)

        @wraps(command)
        def run(**values: Any) -> Any:
            for name, value in values.items():
                if value == "":
                    raise CommandError(f"{flag(name)} is empty: give a value, or leave it out")
            found = {name: values.pop(name) for name in options}
            return command(**values, given={name: value for name, value in found.items() if value is not None})

        parameters = [parameter for name, parameter in own.parameters.items() if name != "given"]
        parameters += [_parameter(entry, shows=name not in silent) for name, entry in options.items()]
        run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _parameter(entry: Field, *, shows: bool) -> inspect.Parameter:
    default: Any = entry.default
    is_switch = entry.metadata["is_switch"]
    if isinstance(default, bool):
        default = None if is_switch else flag(entry.name if default else f"no-{entry.name}")
    kind: Any = entry.type
    return inspect.Parameter(
        entry.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=typer.Option(
            None,
            *([flag(entry.name)] if is_switch else []),
            help=entry.metadata["help"] + (rf" \[default: {default}]" if shows and default is not None else ""),
            show_default=False,
            rich_help_panel=entry.metadata["panel"],
            metavar=entry.metadata["metavar"] or METAVARS.get(kind),
        ),
        annotation=kind | None,
    )
