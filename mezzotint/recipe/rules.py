"""Rules: they choose a recipe for each linear of a model by its name.

    Rules([("layers.0.*", None), ("*.mlp.fc2", NVFP4BlockScaling()), ("*", MXFP8BlockScaling())])

The first rule whose pattern matches decides. A module learns once what rules give it (`layer/bind.py`), and runs with
that recipe as if an `autocast` of its own were around it. A module whose tensors have several recipes gets a
`MixedRecipe`.
"""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mezzotint.recipe.base import Recipe, recipe_class
from mezzotint.recipe.custom import CustomRecipe
from mezzotint.recipe.names import as_recipe
from mezzotint.recipe.requests import QuantizerRequest
from mezzotint.recipe.roles import BACKWARD_TENSORS, QuantizerRole
from mezzotint.recipe.tables import (
    Table,
    check_keys,
    list_of_tables,
    parse_tables,
    read_source,
    recipe_of_table,
    table_of_recipe,
    write_tables,
)
from mezzotint.tensor.identity import IdentityQuantizer
from mezzotint.tensor.quantizer import Quantizer

RULED_TENSORS = ("input", "weight", "grad_output")


@recipe_class
class MixedRecipe(Recipe):
    """This recipe is for one module whose tensors have several recipes. `Rules` makes it; users need not.

    Args:
        parts: For each matrix product of the module, the recipes of its input, its weight and its output gradient; None
            is high precision.

    Example:
        >>> from mezzotint.recipe import MixedRecipe, Rules
        >>> rules = Rules([("*:weight", "mxfp8"), ("*", "nvfp4")])
        >>> mixed = rules.resolve("layers.0.proj", [""])
        >>> isinstance(mixed, MixedRecipe)
        True
        >>> [type(each).__name__ for each in mixed.parts[0]]
        ['NVFP4BlockScaling', 'MXFP8BlockScaling', 'NVFP4BlockScaling']
    """

    parts: tuple[tuple[Recipe | None, ...], ...]

    def of(self, gemm: int, tensor_type: str) -> Recipe | None:
        """Return a tensor's recipe. An output has that of the input, an input gradient that of the output gradient."""
        place = 1 if tensor_type == "weight" else 2 if tensor_type in BACKWARD_TENSORS else 0
        return self.parts[gemm][place]

    def answers_once(self) -> bool:
        return all(each.answers_once() for each in self._known())

    def products(self) -> tuple[bool, bool, bool]:
        raise NotImplementedError("each GEMM of a MixedRecipe has its own")

    def override(self) -> str | None:
        return next((each.override() for each in self._known() if each.override() is not None), None)

    def keeps_wgrad(self) -> bool:
        return any(each.keeps_wgrad() for each in self._known())

    def quantizes_attention(self) -> bool:
        return any(each.quantizes_attention() for each in self._known())

    def alignment(self) -> int:
        return max(each.alignment() for each in self._known())

    def _known(self) -> list[Recipe]:
        return [each for gemm in self.parts for each in gemm if each is not None]


@recipe_class
class Rules(Recipe):
    """Rules are pairs of a pattern and a recipe: each linear layer of a model gets the recipe of the first pattern that
    its name matches.

    A pattern is matched with the name of each linear, its path in the model ("layers.3.mlp.fc1"), and with the path of
    the module that it is a part of ("layers.3.mlp"); `*`, `?` and `[0-3]` mean what they mean for file names. It may
    end with a tensor: "*.fc2:grad_output" is for the output gradients of these linears alone, and ":input" and
    ":weight" are for the others. A linear that no pattern matches raises an error: end with `("*", ...)`.

    A model is bound to the rules once, by `bind_rules`, before it runs in a region with them. The recipes are taken as
    they are when the rules are made.

    Args:
        rules: Pairs of a pattern and a recipe, or its short name, or None for high precision.

    Raises:
        TypeError: If `rules` is not made of such pairs.
        ValueError: If it is empty, or a pattern cannot match.

    Example:
        >>> from mezzotint.recipe import Rules
        >>> rules = Rules([("layers.0.*", None), ("*", "mxfp8")])
        >>> rules.resolve("layers.0.proj", [""]) is None
        True
        >>> type(rules.resolve("layers.1.proj", [""])).__name__
        'MXFP8BlockScaling'
    """

    rules: Any

    def __post_init__(self) -> None:
        given = self.rules
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise TypeError(f"rules is {type(given).__name__}: give pairs of a pattern and a recipe, or None")
        made = tuple([_as_rule(number, each) for number, each in enumerate(given, 1)])
        if not made:
            raise ValueError('rules is empty: give pairs of a pattern and a recipe, such as ("*", "mxfp8")')
        object.__setattr__(self, "rules", made)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()  # an unpickled recipe can be changed, so it is frozen again

    def resolve(self, path: str, linears: Sequence[str], *, is_group: bool = False) -> Recipe | None:
        """Return what these rules give a module: one recipe, None for high precision, or a `MixedRecipe`.

        `linears` are the names of the module's GEMMs after its `path`. `is_group` says that they are multiplied
        together, so that they must have one format.
        """
        names = [f"{path}.{linear}" if path and linear else path or linear for linear in linears]
        parts = tuple([tuple([self._choose(path, name, role) for role in RULED_TENSORS]) for name in names])
        first = parts[0][0]
        if all(each == first for gemm in parts for each in gemm):
            return first
        if is_group and any(gemm != parts[0] for gemm in parts):
            raise ValueError(
                f"rules give the groups of {path!r} several recipes, which are multiplied together: give one"
            )
        for name, gemm in zip(names, parts, strict=True):
            _check_mixture(name, gemm)
        return MixedRecipe(parts).frozen()

    def find_unused(self, linears: Iterable[tuple[str, str]]) -> list[str]:
        """Return the patterns that match none of the linears, each given as the path of its module and its name."""
        known = list(linears)
        return [
            pattern for pattern, _ in self.rules if not any(_matches(pattern, path, name, None) for path, name in known)
        ]

    def _choose(self, path: str, name: str, tensor_type: str) -> Recipe | None:
        for pattern, recipe in self.rules:
            if _matches(pattern, path, name, tensor_type):
                return recipe
        raise ValueError(
            f'no rule matches {tensor_type} of {name!r}: end the rules with ("*", recipe), or ("*", None) to leave all '
            "else in high precision"
        )

    def quantizer(self, role: QuantizerRole) -> Quantizer | QuantizerRequest:
        """Return how the tensor of a role is quantized, by its name. Modules ask the recipe that they are bound to."""
        tensor_type = "weight" if role.tensor_type == "weight" else "input"
        tensor_type = "grad_output" if role.tensor_type in BACKWARD_TENSORS else tensor_type
        recipe = self._choose(role.name, role.name, tensor_type)
        return IdentityQuantizer() if recipe is None else recipe.quantizer(role)

    @classmethod
    def from_toml(cls, path: str | Path) -> "Rules":
        """Return the rules that are in a file, one table [[rule]] for each."""
        source = str(path)
        return rules_of_tables(list_of_tables(parse_tables(read_source(path), source), "rule", source), source)

    def as_toml(self) -> str:
        """Return the text that `to_toml` writes."""
        return write_tables("rule", tables_of_rules(self))

    def to_toml(self, path: str | Path) -> None:
        """Write the rules into a file."""
        Path(path).write_text(self.as_toml(), encoding="utf-8")

    def recipes(self) -> list[Recipe]:
        """Return the recipes of all rules that have one, in order."""
        return [recipe for _, recipe in self.rules if recipe is not None]

    def override(self) -> str | None:
        return next((each.override() for each in self.recipes() if each.override() is not None), None)

    def keeps_wgrad(self) -> bool:
        return any(each.keeps_wgrad() for each in self.recipes())

    def quantizes_attention(self) -> bool:
        return any(each.quantizes_attention() for each in self.recipes())

    def alignment(self) -> int:
        return max([each.alignment() for each in self.recipes()], default=1)


def choose_recipe(recipe: Recipe | None, config: Any) -> Recipe | None:
    """Return the recipe of a module with this configuration: what rules chose for it, or, if `recipe` is not of rules,
    itself.

    This is no method of a recipe: what such a method returns is a constant in a graph, which then does not guard on
    what a factory of the recipe reads.

    Args:
        recipe: The recipe in force, or None for high precision.
        config: The configuration of the module, which is asked only if `recipe` is a `Rules`.

    Returns:
        A recipe, or None for high precision.

    Example:
        >>> from mezzotint.recipe import MXFP8BlockScaling, choose_recipe
        >>> recipe = MXFP8BlockScaling()
        >>> choose_recipe(recipe, None) is recipe
        True
    """
    return config.under(recipe) if isinstance(recipe, Rules) else recipe


def rules_of_tables(tables: Sequence[Table], source: str) -> Rules:
    """Return the rules that TOML tables describe; `source` is their name in error messages."""
    made = []
    for number, table in enumerate(tables, 1):
        where = f"rule {number} of {source}"
        check_keys(table, {"match", "recipe", "options"}, where)
        made.append((table.get("match", ""), recipe_of_table(table, where)))
    try:
        return Rules(made)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source}: {error}") from None


def tables_of_rules(rules: Rules) -> list[Table]:
    """Return the tables of rules, in order."""
    return [{"match": pattern, **table_of_recipe(recipe)} for pattern, recipe in rules.rules]


def _as_rule(number: int, given: Any) -> tuple[str, Recipe | None]:
    """Return a rule as it is kept: a pattern that can match, and a frozen recipe or None."""
    if isinstance(given, str) or not isinstance(given, Sequence) or len(given) != 2:
        raise TypeError(f"rule {number} is {given!r}: give a pair of a pattern and a recipe, or None")
    pattern, recipe = given
    if not isinstance(pattern, str):
        raise TypeError(f"the pattern of rule {number} is {type(pattern).__name__}: give text, such as 'layers.0.*'")
    name, colon, role = pattern.partition(":")
    if not name or name != name.strip() or (colon and role not in RULED_TENSORS):
        raise ValueError(
            f"the pattern of rule {number} is {pattern!r}: give the name of a linear, in which * stands for any text, "
            f"and behind a colon, if you like, one of {', '.join(RULED_TENSORS)}"
        )
    if recipe is None:
        return pattern, None
    recipe = as_recipe(recipe).frozen()
    if isinstance(recipe, Rules | MixedRecipe):
        raise TypeError(f"the recipe of rule {number} is {type(recipe).__name__}: give a recipe that is none of rules")
    return pattern, recipe


def _matches(pattern: str, path: str, name: str, tensor_type: str | None) -> bool:
    """Return whether a pattern matches a linear, by its name or its module's path, and this tensor of it, or any."""
    wanted, _, role = pattern.partition(":")
    if role and tensor_type is not None and role != tensor_type:
        return False
    return fnmatchcase(name, wanted) or fnmatchcase(path, wanted)


def _check_mixture(name: str, gemm: Sequence[Recipe | None]) -> None:
    """Raise ValueError if the recipes of one linear's tensors do not go together."""
    known = [each for each in gemm if each is not None]
    if len(known) == len(gemm) and all(each == known[0] for each in known):
        return
    if any(isinstance(each, CustomRecipe) for each in known):
        raise ValueError(
            f"rules give the tensors of {name!r} several recipes, and one is a CustomRecipe, which chooses for each "
            "tensor itself: give it the whole linear"
        )
    if len({(each.override(), each.keeps_wgrad()) for each in known}) > 1:
        raise ValueError(
            f"rules give the tensors of {name!r} recipes whose backward computes in different ways (backward_override, "
            "or a weight gradient in high precision): give them recipes that agree on it"
        )
