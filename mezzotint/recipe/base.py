"""Recipe: the base class of all recipes, and what modules ask of one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from mezzotint.recipe.requests import QuantizerRequest
from mezzotint.recipe.roles import QuantizerRole
from mezzotint.tensor.graph_constant import GraphConstant
from mezzotint.tensor.quantizer import Quantizer

# The methods `quantizer` that go by the fields of the recipe and the type of the tensor alone; `names.py` fills it.
ANSWERS: set[Callable] = set()


@dataclass(frozen=True, eq=False)
class Recipe(GraphConstant):
    """Base of all recipes."""

    # In figures. Those of ours are Okabe and Ito's, which colour-blind readers can tell apart.
    colour: ClassVar[str] = "grey"
    # What the questions below, which are upstream's, go by: a class and those that are derived from it have one.
    _family: ClassVar[str] = ""

    def quantizer(self, role: QuantizerRole) -> Quantizer | QuantizerRequest:
        """How the tensor of this role is quantized."""
        raise NotImplementedError(f"{type(self).__name__} does not say how tensors are quantized")

    def answers_once(self) -> bool:
        """Return whether `quantizer` goes by the fields of the recipe and the type of the tensor alone. A factory, or a
        user's own recipe, may go by the name of the module, or by what changes: it is asked at each run."""
        return type(self).quantizer in ANSWERS

    def products(self) -> tuple[bool, bool, bool]:
        """Whether forward, input-gradient and weight-gradient GEMM may accumulate fast, with fewer bits."""
        return True, False, False

    def override(self) -> str | None:
        """None, or how backward computes without quantizing: on the original tensors, or on what forward made."""
        return getattr(self, "backward_override", None)

    def quantizes_attention(self) -> bool:
        """Whether it asks for attention in low precision."""
        return bool(getattr(self, "fp8_dpa", False) or getattr(self, "fp8_mha", False))

    def keeps_wgrad(self) -> bool:
        """Whether the weight gradient alone is computed in high precision."""
        return False

    def alignment(self) -> int:
        """Rows of a group of tokens are padded to a multiple of this by `Fp8Padding`."""
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


def check_recipe(recipe: Any) -> None:
    """What is given for a recipe is one, not its class or its name."""
    if not isinstance(recipe, Recipe):
        kind = "type" if isinstance(recipe, type) else type(recipe).__name__
        raise TypeError(f"recipe is {kind}: give one of mezzotint.recipe, such as DelayedScaling()")
