"""Recipes as text: a TOML table has `recipe`, a short name, and `options`, those that are not the defaults.

    recipe = "nvfp4"
    options = { disable_rht = true }

"high_precision" stands for no recipe. `Rules` and `Schedule` write lists of such tables.
"""

import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from mezzotint.recipe.base import Recipe
from mezzotint.recipe.names import RECIPES
from mezzotint.recipe.options import Format, MMParams, QParams
from mezzotint.recipe_names import recipe_short_name

NO_RECIPE = "high_precision"
Table = dict[str, Any]


def parse_tables(text: str, source: str) -> Table:
    """Return what a TOML text holds; `source` is its name in error messages."""
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"{source} is no TOML: {error}") from None


def read_source(path: str | Path) -> str:
    """Return the text of a file."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} cannot be read: it is no text in UTF-8") from None


def list_of_tables(held: Mapping[str, Any], key: str, source: str) -> list[Table]:
    """Return the tables [[key]]; raise ValueError if there are none, or if there is anything else."""
    found = held.get(key)
    if not isinstance(found, list) or not found or not all(isinstance(each, dict) for each in found):
        raise ValueError(f"{source} has no [[{key}]]: write one table [[{key}]] for each")
    check_keys(held, {key}, source)
    return found


def check_keys(table: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Raise ValueError if a table has a key that is not `known`, because nobody would read it."""
    unknown = sorted(table.keys() - set(known))
    if unknown:
        raise ValueError(f"{where} has {unknown[0]!r}: it takes {', '.join(sorted(known))}")


def recipe_of_table(table: Mapping[str, Any], where: str) -> Recipe | None:
    """Return the recipe that a table describes, or None for high precision."""
    name, options = table.get("recipe"), table.get("options", {})
    known = f"give one of {', '.join(RECIPES)}, or {NO_RECIPE}"
    if not isinstance(name, str):
        raise ValueError(f"{where} has no recipe: {known}")
    if not isinstance(options, dict):
        raise ValueError(f"{where} has options that are no table: write options = {{ name = value }}")
    if name == NO_RECIPE:
        check_keys(options, (), f"{where}, which is in high precision and has no options,")
        return None
    short = recipe_short_name(name)
    if short is None:
        raise ValueError(f"{where} has recipe {name!r}: {known}")
    kind = RECIPES[short]
    check_keys(options, [field.name for field in fields(kind)], f"{where}: {name}")  # type: ignore[arg-type]
    try:
        return kind(**{key: _as_option(kind, key, value) for key, value in options.items()})
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(f"{where}: {error}") from None


def _as_option(kind: type[Recipe], name: str, value: Any) -> Any:
    """Return an option of a recipe as its constructor takes it."""
    if isinstance(value, dict):
        of_products = value.keys() <= {field.name for field in fields(MMParams)}
        return MMParams(**value) if of_products else QParams(**value)
    if isinstance(getattr(kind, name, None), Format):
        if value not in Format.__members__:
            raise ValueError(f"{name} is {value!r}: give one of {', '.join(Format.__members__)}")
        return Format[value]
    return value


def table_of_recipe(recipe: Recipe | None) -> Table:
    """Return the table of a recipe; raise ValueError for one that holds functions or is a user's own."""
    if recipe is None:
        return {"recipe": NO_RECIPE}
    short = next((name for name, kind in RECIPES.items() if type(recipe) is kind), None)
    if short is None:
        raise ValueError(f"{type(recipe).__name__} cannot be written as TOML: it is none of {', '.join(RECIPES)}")
    default, options = RECIPES[short](), {}
    for field in fields(recipe):  # type: ignore[arg-type]
        value = getattr(recipe, field.name)
        if value == getattr(default, field.name) or getattr(value, "_is_filled", False):
            continue
        if isinstance(value, Format):
            value = value.name
        options[field.name] = asdict(value) if isinstance(value, MMParams | QParams) else value
    for name, value in options.items():
        if not isinstance(value, bool | int | float | str | dict) or value in (math.inf, -math.inf):
            raise ValueError(f"{type(recipe).__name__} cannot be written as TOML: {name} is {value!r}")
    return {"recipe": short, **({"options": options} if options else {})}


def write_tables(key: str, tables: Iterable[Mapping[str, Any]]) -> str:
    """Return tables as TOML text, each under [[key]]. A list of tables inside one goes under [[key.name]]."""
    lines: list[str] = []
    for table in tables:
        lines.append(f"[[{key}]]")
        lines += [f"{name} = {_as_text(value)}" for name, value in table.items() if not isinstance(value, list)]
        for name, value in table.items():
            if isinstance(value, list):
                lines += ["", write_tables(f"{key}.{name}", value).rstrip("\n")]
        lines.append("")
    return "\n".join(lines)


def _as_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{name} = {_as_text(each)}" for name, each in value.items()) + " }"
    if isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)
