"""The memory modes: they say how much forward holds for backward under a recipe. Give one to a region, a module or
`convert`.

"default"     holds a quantized copy of the input of each linear
"lean"        holds nothing that backward can make again: a norm or an activation quantizes its output for the linear
              behind it a second time, and a `Linear` holds its input as it came, which another operation often
              holds anyway (attention holds its output), and which a compiler can make again. The bits are those of
              "default"
"compressed"  is lean, and holds the input h of an MLP's activation in FP8 with a scale for each 128 elements. Its
              gradients differ: they are computed on an h that is off by at most |h| / 16, or by 2^-10 / 448 of the
              largest |h| of its 128 elements if that is more
"""

from typing import Any

MEMORY_MODES = ("default", "lean", "compressed")


def check_memory(caller: str, memory: Any) -> str:
    """Return a memory mode; raise ValueError if it is none."""
    if not isinstance(memory, str) or memory not in MEMORY_MODES:
        raise ValueError(f"{caller}(memory={memory!r}): give one of {', '.join(map(repr, MEMORY_MODES))}")
    return memory
