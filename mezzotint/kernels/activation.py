"""Activations between two GEMMs: they are computed in FP32 and rounded once, at the end, to the input's dtype.

    gelu     x · (0.5 + 0.5 · tanh(x · (0.79788456 + 0.03567741 · x²)))      relu    max(x, 0)
    qgelu    x · sigmoid(1.702 · x)                                          srelu   max(x, 0)²
    silu     x · sigmoid(x)                                                  sigmoid

Gated activations take x = [x1 | x2] along the last dimension and give act(x1) · x2: geglu, qgeglu, swiglu, reglu,
sreglu, glu (sigmoid). The activation is applied to the first half; torch's GLU has it the other way round.

    clamped_swiglu (limit, alpha, offset)    a = min(x1, limit);  a · sigmoid(alpha · a) · (clamp(x2, ±limit) + offset)
    situglu (beta1, beta2)                   beta1 · tanh(x1 / beta1) · sigmoid(x1) · beta2 · tanh(x2 / beta2)

`bias` [width of x] is added first and the sum is rounded to x's dtype, as if it had been added before. The gradient of
the bias is the FP32 sum over rows of the rounded gradient of x.

`scales`, one per row (an expert's probability), multiply the rounded output of the activation, and the product is
rounded again: y = round(round(act(x)) · s). Backward: dx = round(round(dy · s) · act'(x)), ds = sum(round(act(x)) ·
dy).
"""

from collections.abc import Callable, Sequence

import torch

from mezzotint.kernels._lib import as_matrix, launch_in_graphs, leaf

Pair = tuple[torch.Tensor, torch.Tensor]


def _gelu(x: torch.Tensor) -> Pair:
    square = x * x
    t = torch.tanh(x * (0.79788456 + 0.03567741 * square))
    half = 0.5 + 0.5 * t
    return x * half, 0.5 * x * ((1.0 - t * t) * (0.79788456 + 0.1070322243 * square)) + half


def _qgelu(x: torch.Tensor) -> Pair:
    s = torch.sigmoid(1.702 * x)
    return x * s, 1.702 * x * s * (1.0 - s) + s


def _silu(x: torch.Tensor) -> Pair:
    s = torch.sigmoid(x)
    return x * s, x * s * (1.0 - s) + s


def _sigmoid(x: torch.Tensor) -> Pair:
    s = torch.sigmoid(x)
    return s, s * (1.0 - s)


def _relu(x: torch.Tensor) -> Pair:
    return x.relu(), (x > 0).float()


def _srelu(x: torch.Tensor) -> Pair:
    positive = x.relu()
    return positive * positive, 2.0 * positive


# Each function returns its value and its derivative in FP32.
PLAIN: dict[str, Callable[[torch.Tensor], Pair]] = {
    "gelu": _gelu,
    "qgelu": _qgelu,
    "silu": _silu,
    "sigmoid": _sigmoid,
    "relu": _relu,
    "srelu": _srelu,
}
GATED = {
    "geglu": "gelu",
    "qgeglu": "qgelu",
    "swiglu": "silu",
    "glu": "sigmoid",
    "reglu": "relu",
    "sreglu": "srelu",
}
# Gated activations with parameters, and the defaults of these.
PARAMETERS = {
    "clamped_swiglu": {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0},
    "situglu": {"beta1": 4.0, "beta2": 25.0},
}
ACTIVATIONS = (*(name for name in PLAIN if name != "sigmoid"), *GATED, *PARAMETERS)


def is_gated(name: str) -> bool:
    """Return whether the activation's input is twice as wide as its output."""
    return name in GATED or name in PARAMETERS


def _gated(x: torch.Tensor, name: str, params: Sequence[float]) -> tuple[Pair, Pair]:
    """Return (value, derivative) of each half's factor; the output is the product of the two values."""
    x1, x2 = x.chunk(2, -1)
    if name == "clamped_swiglu":
        limit, alpha, offset = params
        a = x1.clamp(max=limit)
        s = torch.sigmoid(alpha * a)
        slope = torch.where(x1 <= limit, s + a * alpha * s * (1.0 - s), 0.0)
        gate = x2.clamp(-limit, limit)
        return (a * s, slope), (gate + offset, ((x2 >= -limit) & (x2 <= limit)).float())
    if name == "situglu":
        beta1, beta2 = params
        t, s = torch.tanh(x1 / beta1), torch.sigmoid(x1)
        u = torch.tanh(x2 / beta2)
        return (beta1 * t * s, (1.0 - t * t) * s + beta1 * t * (s * (1.0 - s))), (beta2 * u, 1.0 - u * u)
    return PLAIN[GATED[name]](x1), (x2, torch.ones_like(x2))


def _input(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x in FP32, with the bias added and rounded to x's dtype. The result is contiguous, and so is all that is
    computed from it."""
    value = x.contiguous()
    return value.float() if bias is None else (value.float() + bias.float()).to(x.dtype).float()


def _scaled(value: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Multiply each row by its scale and round to `dtype`; return `value` itself if there are no scales."""
    if scales is None:
        return value
    return (value.float() * scales.float().reshape(*value.shape[:-1], 1)).to(dtype)


def activation_forward_reference(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    name: str,
    params: Sequence[float],
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the activation of x (…, N), or (…, 2N) when gated, as (…, N) in x's dtype. `scales` has the shape (…)."""
    value = _input(x, bias)
    if not is_gated(name):
        return _scaled(PLAIN[name](value)[0].to(x.dtype), scales, x.dtype)
    (first, _), (second, _) = _gated(value, name, params)
    return _scaled((first * second).to(x.dtype), scales, x.dtype)


def activation_backward_reference(
    dy: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    name: str,
    params: Sequence[float],
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the gradient of x, in its shape and dtype."""
    value, grad = _input(x, bias), _scaled(dy.contiguous(), scales, x.dtype).float()
    if not is_gated(name):
        return (grad * PLAIN[name](value)[1]).to(x.dtype)
    (first, slope), (second, second_slope) = _gated(value, name, params)
    return torch.cat(((grad * slope * second).to(x.dtype), (grad * first * second_slope).to(x.dtype)), -1)


def activation_scale_gradient_reference(
    dy: torch.Tensor, x: torch.Tensor, name: str, params: Sequence[float]
) -> torch.Tensor:
    """Return the gradient of `scales`, FP32 (…)."""
    return (activation_forward_reference(x, None, name, params).float() * dy.contiguous().float()).sum(-1)


def column_sum_reference(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sum x (…, N) over all dimensions but the last in FP32, and return [N], cast once to `dtype`."""
    return as_matrix(x).sum(0, dtype=torch.float32).to(dtype)


def _forward_fake(
    x: torch.Tensor, bias: torch.Tensor | None, name: str, params: Sequence[float], *_: object
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2 if is_gated(name) else x.shape[-1]))


def _backward_fake(dy: torch.Tensor, x: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty(x.shape)


activation_forward = leaf(
    "activation_forward(Tensor x, Tensor? bias, str name, float[] params, Tensor? scales=None) -> Tensor",
    fake=_forward_fake,
    cpu=activation_forward_reference,
    cuda="activation:forward",
)

activation_backward = leaf(
    "activation_backward(Tensor dy, Tensor x, Tensor? bias, str name, float[] params, Tensor? scales=None) -> Tensor",
    fake=_backward_fake,
    cpu=activation_backward_reference,
    cuda="activation:backward",
)

activation_scale_gradient = leaf(
    "activation_scale_gradient(Tensor dy, Tensor x, str name, float[] params) -> Tensor",
    fake=lambda dy, x, name, params: x.new_empty(x.shape[:-1], dtype=torch.float32),
    cpu=activation_scale_gradient_reference,
    cuda="activation:scale_gradient",
)

column_sum = launch_in_graphs(
    leaf(
        "column_sum(Tensor x, ScalarType dtype) -> Tensor",
        fake=lambda x, dtype: x.new_empty((x.shape[-1],), dtype=dtype),
        cpu=column_sum_reference,
        cuda="activation:column_sum",
    )
)
