"""Forms of operations: this module finds out what a class of operations writes itself, that is the form of its forward,
and whether it computes as its parent does.

A forward is written whole or split, for one operation ("op") or as a fuser calls it ("fuser"); see `op.py`.
"""

from typing import Any

FORMS: dict[str, tuple[str, tuple[str, str]]] = {
    "op": ("op_forward", ("op_forward_compute", "op_forward_save_ctx")),
    "fuser": ("fuser_forward", ("fuser_forward_compute", "fuser_forward_save_ctx")),
}
EXAMPLE = {
    "op": (
        "    def op_forward_compute(self, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer,\n"
        "                           **kwargs):\n"
        "        return output, tensors_to_save\n"
        "    def op_forward_save_ctx(self, ctx, input_, tensors_to_save, *, prev_op_grad_output_quantizer,\n"
        "                            next_op_input_quantizer, **kwargs):\n"
        "        ctx.save_for_backward(*tensors_to_save)"
    ),
    "fuser": (
        "    def fuser_forward_compute(self, input_, *, basic_op_extra_inputs, prev_op_grad_output_quantizer,\n"
        "                              next_op_input_quantizer, basic_op_kwargs):\n"
        "        return output, extra_outputs, tensors_to_save\n"
        "    def fuser_forward_save_ctx(self, basic_op_ctxs, input_, tensors_to_save, *, basic_op_extra_inputs,\n"
        "                               prev_op_grad_output_quantizer, next_op_input_quantizer, basic_op_kwargs):\n"
        "        basic_op_ctxs[0].save_for_backward(*tensors_to_save)"
    ),
}
# A pipeline calls these methods of an operation.
CALLED = frozenset(
    {"op_backward", "fuser_backward", *[name for whole, split in FORMS.values() for name in (whole, *split)]}
)
# These methods do not count as computing: a pipeline calls them in a fused operation too, or not at all.
_NOT_COMPUTING = ("extra_repr", "forward", "pre_first_fuser_forward", "pre_fuser_forward", "reset_parameters")


def own_names(cls: type, root: type) -> set[str]:
    """Return the names that this class writes, itself or by classes mixed into it that are no operations (subclasses of
    `root`)."""
    parents = [base for base in cls.__bases__ if issubclass(base, root)]
    own = [base for base in cls.__mro__ if not any(issubclass(parent, base) for parent in parents)]
    return {name for base in own for name in vars(base)}


def computes_anew(cls: type, root: type, own: set[str]) -> bool:
    """Return whether the class writes a method that its parents compute with."""
    for base in cls.__mro__[1:]:
        if not issubclass(base, root):
            continue
        for name, value in vars(base).items():
            is_method = callable(value) or isinstance(value, property | staticmethod | classmethod)
            if is_method and name in own and name not in _NOT_COMPUTING and not name.startswith("__"):
                return True
    return False


def written_form(cls: Any, own: set[str]) -> tuple[str, bool] | None:
    """Return the family ("op" or "fuser") of the forward that this class writes, and whether it is split, or None if it
    writes none.

    A forward that is written twice, or by half, is refused.
    """
    wholes = [family for family, (whole, _) in FORMS.items() if whole in own]
    halves = [family for family, (_, split) in FORMS.items() if split[0] in own or split[1] in own]
    for family in halves:
        split = FORMS[family][1]
        for name, other in (split, split[::-1]):
            if name in own and other not in own and not _inherits(cls, other):
                raise TypeError(
                    f"{cls.__name__} defines {name} without {other}: the split form has two halves. "
                    f"Write\n{EXAMPLE[family]}"
                )
    if wholes and halves:
        raise TypeError(
            f"{cls.__name__} defines {FORMS[wholes[0]][0]} and {FORMS[halves[0]][1][0]}: a forward is written whole "
            f"or split, not both. Keep {FORMS[wholes[0]][0]}, or write\n{EXAMPLE[halves[0]]}"
        )
    if not wholes and not halves:
        return None
    return "fuser" if "fuser" in (wholes or halves) else "op", bool(halves)


def hide_other_forms(cls: Any, own: set[str], family: str, is_split: bool) -> None:
    """Replace the inherited forms of forward by those of the base class, so that who calls the form of a parent gets
    this class's instead."""
    base = _base_of(cls)
    hidden = [FORMS["op"][0], FORMS["fuser"][0]] if is_split else []
    if family == "op":
        hidden += [FORMS["fuser"][0], *FORMS["fuser"][1]]
    for name in hidden:
        if name not in own and hasattr(base, name):
            setattr(cls, name, getattr(base, name))


def _base_of(cls: type) -> Any:
    """Return the class above whose forwards are there to be replaced."""
    return next(base for base in cls.__mro__ if vars(base).get("_is_base", False))


def _inherits(cls: type, name: str) -> bool:
    """Return whether the nearest class above that writes a forward writes this half of it, too."""
    root = _base_of(cls)
    for base in cls.__mro__[1:]:
        if base is root:
            break
        if name in vars(base):
            return True
        wholes = [whole for whole, _ in FORMS.values() if whole in vars(base)]
        if any(vars(base)[whole] is not getattr(root, whole, None) for whole in wholes):
            return False
    return False
