"""Recipe: the base class of all recipes, which says what modules ask of one.

A recipe can be changed, `recipe.margin = 1`. Regions, plans and graphs hold `recipe.frozen()`, an equal recipe that
cannot be changed. It is made once and kept until the next assignment, so that equal regions have the very same object.
"""

import copy
import warnings
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, fields
from functools import wraps
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform

from mezzotint.recipe.options import OptionsConflictError
from mezzotint.recipe.requests import QuantizerRequest
from mezzotint.recipe.roles import QuantizerRole
from mezzotint.tensor.graph_constant import GraphConstant
from mezzotint.tensor.quantizer import Quantizer

# These `quantizer` methods depend on the fields of the recipe and the type of the tensor alone; `names.py` fills the
# set.
ANSWERS: set[Callable] = set()

# These are former options of Transformer Engine's recipes, which its users still give and it ignores, and options that
# Megatron-LM adds.
_IGNORED = ("interval", "override_linear_precision", "params_dtype", "device")

_R = TypeVar("_R", bound="Recipe")


class Recipe(GraphConstant):
    """This is the base class of all recipes. A recipe says, for every tensor of a module, how it is quantized.

    Recipes are dataclasses: options are given to the constructor, and can be assigned later. Equal recipes are
    interchangeable. A user's own recipe is derived from one of this package's, or from this class as a dataclass,
    `@dataclass(eq=False)`, with a method `quantizer(role)`.

    Example:
        >>> from dataclasses import dataclass
        >>> import mezzotint as mz
        >>> @dataclass(eq=False)
        ... class WeightsOnly(mz.recipe.Recipe):
        ...     def quantizer(self, role):
        ...         return mz.MXFP8Quantizer() if role.tensor_type == "weight" else mz.IdentityQuantizer()
        >>> WeightsOnly() == WeightsOnly()
        True
        >>> mz.recipe.MXFP8BlockScaling() == mz.recipe.MXFP8BlockScaling(enable_2d_quantization=True)
        False
    """

    # This is the colour in plots. This package's recipes have Okabe and Ito's colours, which colour-blind readers can
    # tell apart.
    colour: ClassVar[str] = "grey"
    # The class methods below, which are Transformer Engine's, go by this name; subclasses inherit it.
    _family: ClassVar[str] = ""

    _value: "Recipe | None" = None  # what `frozen` returned since the last assignment
    _options: dict[str, Any] | None = None  # set if it is frozen: all its options

    def __post_init__(self) -> None:
        """Fill in options that were left out, and check all of them. This is called again after each assignment."""

    def frozen(self) -> Self:
        """Return an equal recipe that cannot be changed. Options that exclude each other raise an error here, and not
        when they are assigned one after the other."""
        if self._value is None and self._options is None:
            self.__post_init__()
        return self._snapshot()

    def _snapshot(self) -> Self:
        if self._options is not None:
            return self
        if self._value is None:
            if type(self).__hash__ is None:  # a user's dataclass with eq=True has no hash
                type(self).__hash__ = Recipe.__hash__  # type: ignore[method-assign]
            made = object.__new__(type(self))
            options = {name: value for name, value in self.__dict__.items() if name != "_value"}
            made.__dict__.update(options, _options=options)
            self.__dict__["_value"] = made
        return self._value  # type: ignore[return-value]

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign an option. The recipe is then as if it had been made with it, or unchanged if that raises an error."""
        if self._options is not None:
            raise FrozenInstanceError(
                f"cannot assign {name}: this {type(self).__name__} is what a region works with. Change the recipe that "
                f"the region was given, for the next region, or make another: dataclasses.replace(recipe, {name}=...)"
            )
        held = self.__dict__
        if name not in held:  # the constructor assigns, and checks at its end
            if name not in vars(type(self)).get("__dataclass_fields__", {name}):
                names = ", ".join(field.name for field in fields(self))  # type: ignore[arg-type]
                raise AttributeError(f"{type(self).__name__} has no option {name}: it has {names}")
            held[name] = value
            if self._value is not None:
                held["_value"] = None
            return
        before = dict(held)
        held.update({name: value, "_value": None})
        try:
            self.__post_init__()
        except OptionsConflictError:
            pass  # another assignment may resolve it, and `frozen` raises it
        except Exception:
            held.clear()
            held.update(before)
            raise

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"cannot delete {name}: every option of {type(self).__name__} has a value; assign one")

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return self is other or self._key() == other._key()

    def __hash__(self) -> int:
        """Return a hash of the class alone: a recipe that is a key of a dictionary keeps it when it is changed."""
        return hash(type(self))

    def _key(self) -> dict[str, Any]:
        options = self._snapshot()._options
        assert options is not None
        return options

    def __getstate__(self) -> dict[str, Any]:
        return self._key()

    def __copy__(self) -> Self:
        return self if self._options is not None else self._changeable(self._key())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self if self._options is not None else self._changeable(copy.deepcopy(self._key(), memo))

    def _changeable(self, options: dict[str, Any]) -> Self:
        made = object.__new__(type(self))
        made.__dict__.update(options)
        return made

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        return super().__fx_repr__() if self._options is not None else self._snapshot().__fx_repr__()

    def quantizer(self, role: QuantizerRole) -> Quantizer | QuantizerRequest:
        """Return how the tensor of this role is quantized: a quantizer, or a request for state in the module."""
        raise NotImplementedError(f"{type(self).__name__} does not say how tensors are quantized")

    def of(self, gemm: int, tensor_type: str) -> "Recipe | None":
        """Return the recipe of one tensor of a module: this one, unless it mixes several (`rules.py`)."""
        return self

    def answers_once(self) -> bool:
        """Return whether `quantizer` depends on the fields of the recipe and the type of the tensor alone.

        A factory, or a user's own recipe, may go by the name of the module or by changing state, so it is asked at each
        run.
        """
        return type(self).quantizer in ANSWERS

    def products(self) -> tuple[bool, bool, bool]:
        """Return whether the forward, input-gradient and weight-gradient GEMMs may accumulate fast, with fewer bits."""
        return True, False, False

    def override(self) -> str | None:
        """Return how backward computes without quantizing, or None if it quantizes.

        "high_precision" takes the original tensors, "dequantized" the values that forward multiplied.
        """
        return getattr(self, "backward_override", None)

    def quantizes_attention(self) -> bool:
        """Return whether the recipe asks for attention in low precision."""
        return bool(getattr(self, "fp8_dpa", False) or getattr(self, "fp8_mha", False))

    def keeps_wgrad(self) -> bool:
        """Return whether the weight gradient alone is computed in high precision."""
        return False

    def alignment(self) -> int:
        """Return the multiple to which `Fp8Padding` pads the rows of a group of tokens."""
        return 16

    @classmethod
    def nvfp4(cls) -> bool:
        return cls._family == "nvfp4"

    @classmethod
    def mxfp8(cls) -> bool:
        return cls._family == "mxfp8"

    @classmethod
    def delayed(cls) -> bool:
        return cls._family == "delayed"

    @classmethod
    def float8_current_scaling(cls) -> bool:
        return cls._family == "float8_current_scaling"

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        return cls.delayed() or cls.float8_current_scaling()

    @classmethod
    def float8_rowwise_scaling(cls) -> bool:
        return cls._family == "float8_rowwise_scaling"

    @classmethod
    def float8_block_scaling(cls) -> bool:
        return cls._family == "float8_block_scaling"

    @classmethod
    def custom(cls) -> bool:
        return cls._family == "custom"


@dataclass_transform(eq_default=False)
def recipe_class(cls: type[_R]) -> type[_R]:
    """Make a dataclass of a recipe; its constructor drops, with a warning, options that Transformer Engine ignores."""
    made = dataclass(eq=False)(cls)
    init: Any = made.__init__

    @wraps(init)
    def initialize(self: Any, *args: Any, **options: Any) -> None:
        dropped = [f"{name}={options.pop(name)!r}" for name in _IGNORED if name in options]
        if dropped:
            warnings.warn(f"{type(self).__name__} has no {', '.join(dropped)}: it is ignored", stacklevel=2)
        init(self, *args, **options)

    made.__init__ = initialize  # type: ignore[method-assign]
    return made


def check_recipe(recipe: Any) -> None:
    """Raise TypeError unless `recipe` is a recipe, and not its class or its name.

    Args:
        recipe: What is checked.

    Raises:
        TypeError: If it is no recipe.

    Example:
        >>> from mezzotint.recipe import DelayedScaling, check_recipe
        >>> check_recipe(DelayedScaling())
        >>> check_recipe(DelayedScaling)
        Traceback (most recent call last):
        TypeError: recipe is type: give one of mezzotint.recipe, such as DelayedScaling()
    """
    if not isinstance(recipe, Recipe):
        kind = "type" if isinstance(recipe, type) else type(recipe).__name__
        raise TypeError(f"recipe is {kind}: give one of mezzotint.recipe, such as DelayedScaling()")
