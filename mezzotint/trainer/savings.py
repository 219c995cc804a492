"""This module has the ways in which a step can need less memory, and reads the size that it must fit into."""

import re
from dataclasses import dataclass
from functools import partial

from mezzotint.memory import MEMORY_MODES
from mezzotint.trainer.console import CommandError
from mezzotint.trainer.options import check_options, check_word, option

MEMORY_HELP = f"Choose what forward holds for backward: {' or '.join(MEMORY_MODES)}."
STATES = ("float32", "bfloat16", "float16", "fp8")
_UNITS = {"B": 1, **{f"{sign}B": 1000**n for n, sign in enumerate("KMGT", 1)}}
_UNITS |= {f"{sign}IB": 1024**n for n, sign in enumerate("KMGT", 1)}

# These options are one panel of the help.
_saving = partial(option, panel="Memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Savings:
    """A `Savings` says which ways to need less memory a step uses."""

    quantized_weights: bool = _saving(
        False, "Keep weights of matrix products quantized only, with FP32 copies in the optimizer.", is_switch=True
    )
    optimizer_dtype: str = _saving("float32", f"Hold both moments of AdamW in {' or '.join(STATES)}.", metavar="DTYPE")
    recompute: bool = _saving(
        False, "Compute what is inside of a layer again in backward, instead of keeping it.", is_switch=True
    )

    memory: str = _saving("default", MEMORY_HELP, metavar="MODE")

    def __post_init__(self) -> None:
        check_options(self)
        check_word("memory", self.memory, MEMORY_MODES)
        check_word("optimizer_dtype", self.optimizer_dtype, STATES)

    def words(self) -> list[str]:
        """Return the ways that are used, in words."""
        found = ["quantized weights"] if self.quantized_weights else []
        found += [f"moments in {self.optimizer_dtype}"] if self.optimizer_dtype != STATES[0] else []
        found += ["layers recomputed"] if self.recompute else []
        return found + ([f"{self.memory} memory"] if self.memory != MEMORY_MODES[0] else [])


def parse_size(said: str) -> int:
    """Return a size in bytes: "80GB" → 80 * 10^9, "80 GiB" → 80 * 2^30."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*([a-zA-Z]+)", said.strip())
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None or not float(found[1]):
        raise CommandError(f"--fits is {said!r}: give a size with its unit, as 80GB or 80GiB")
    return int(float(found[1]) * unit)
