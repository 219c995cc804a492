"""The input of a kernel: it reads x itself, or computes the tile that a producer in front of it would have written.

A kernel that takes sources has two more arguments: SOURCE, which is None for x itself, and `given`, a tuple with all
that the source reads beside x. It calls `load_input` where it would call `load_tile`.

    SOURCE                                       given, after the partial column sums (see `store_sums`) or None
    ("norm", zero_centered)                      mu or None (RMSNorm), rs, gamma, beta or None
    ("norm_gamma", None)                         mu or None, rs, dy, its stride        not rounded: dgamma's summands
    ("activation", act, gated)                   bias or None, p0, p1, p2, scales of rows or None
    ("activation_backward", act)                 bias or None, p0, p1, p2, scales of rows or None, dy, its stride
    ("halves", act)                              the same, of a gated one: see `load_halves`

A gated gradient (M, 2N) needs the same inputs at columns c and c + N. A program makes both tiles from one read of them;
its kernel calls `load_halves` and walks the two, and has as many programs as N columns take.

Every operation is rounded once, in the order of the reference, so that what is pointwise has the reference's bits;
exponentials differ from it in the last two bits, by up to 2^-19 before they are rounded to 16. The kernels that only
write (`_produce.py`) call the same functions.
"""

from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl

from mezzotint.kernels.activation import GATED, is_gated
from mezzotint.kernels.quantize_ops import SourceCall
from mezzotint.kernels.triton._jit import INTERPRETED, as_rows, load_tile, narrow, rounded

_LOG2E = tl.constexpr(1.44269502162933349609375)  # the FP32 number
_LOG2E_REST = tl.constexpr(1.925963033500952e-08)
_LN2 = tl.constexpr(0.6931471805599453)


# This is 1 / (1 + e^-x) for results of 16 bits, in five instructions: x · log2(e) is rounded. The sum, and so the
# reciprocal, is scaled by 2^-4 and back: 1 / (1 + e^88) is a subnormal number, which the reciprocal would flush.
_SIGMOID = tl.constexpr(
    "{ .reg .f32 e; mul.rn.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; fma.rn.f32 e, e, 0f3D800000, 0f3D800000;"
    " rcp.approx.ftz.f32 e, e; mul.rn.f32 $0, e, 0f3D800000; }"
)


@triton.jit
def _exp(x):
    """Return e^x. The rounding of x · log2(e), which grows with x, is corrected afterwards."""
    x = tl.clamp(x, -128.0, 128.0, tl.PropagateNan.ALL)  # infinity and 0 already; one instruction
    rest = tl.fma(x, _LOG2E, -(x * _LOG2E)) + x * _LOG2E_REST
    return tl.exp(x) * (1.0 + rest * _LN2)


@triton.jit
def _sigmoid(x, FINE: tl.constexpr):
    if FINE or INTERPRETED:
        return 1.0 / (1.0 + _exp(-x))
    else:
        return tl.inline_asm_elementwise(_SIGMOID, "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _tanh(x, FINE: tl.constexpr):
    """Return tanh(x). Near 0 it is a polynomial, because the exponential would lose the small number's bits."""
    s = x * x
    p = tl.fma(s, tl.fma(s, -0.005704042501747608, 0.020637862384319305), -0.05373915657401085)
    p = tl.fma(s, tl.fma(s, p, 0.133314311504364), -0.3333328068256378)
    far = 1.0 - 2.0 * _sigmoid(-2.0 * tl.abs(x), FINE)
    return tl.where(tl.abs(x) < 0.625, x + x * (s * p), tl.where(x < 0, -far, far))


@triton.jit
def act(x, ACT: tl.constexpr, FINE: tl.constexpr):
    """Return (value, derivative), as `PLAIN` has them. FINE says that they stay FP32."""
    if ACT == "gelu":
        square = x * x
        t = _tanh(x * (0.79788456 + 0.03567741 * square), FINE)
        half = 0.5 + 0.5 * t
        return x * half, 0.5 * x * ((1.0 - t * t) * (0.79788456 + 0.1070322243 * square)) + half
    elif ACT == "qgelu":
        s = _sigmoid(1.702 * x, FINE)
        return x * s, 1.702 * x * s * (1.0 - s) + s
    elif ACT == "silu":
        s = _sigmoid(x, FINE)
        return x * s, x * s * (1.0 - s) + s
    elif ACT == "sigmoid":
        s = _sigmoid(x, FINE)
        return s, s * (1.0 - s)
    elif ACT == "relu":
        return tl.where(x < 0, 0.0, x), tl.where(x > 0, 1.0, 0.0)  # NaN and -0 come through
    else:
        tl.static_assert(ACT == "srelu")
        positive = tl.where(x < 0, 0.0, x)
        return positive * positive, 2.0 * positive


@triton.jit
def gates(x1, x2, p0, p1, p2, ACT: tl.constexpr, FINE: tl.constexpr):
    """Return (value, derivative) of either half; the output is the product of the values."""
    if ACT == "clamped_swiglu":
        limit, alpha, offset = tl.cast(p0, tl.float32), tl.cast(p1, tl.float32), tl.cast(p2, tl.float32)
        a = tl.where(x1 > limit, limit, x1)
        s = _sigmoid(alpha * a, FINE)
        slope = tl.where(x1 <= limit, s + a * alpha * s * (1.0 - s), 0.0)
        gate = tl.where(x2 > limit, limit, tl.where(x2 < -limit, -limit, x2))
        return a * s, slope, gate + offset, tl.where((x2 >= -limit) & (x2 <= limit), 1.0, 0.0)
    elif ACT == "situglu":
        beta1, beta2 = tl.cast(p0, tl.float32), tl.cast(p1, tl.float32)
        t, s, u = _tanh(tl.div_rn(x1, beta1), FINE), _sigmoid(x1, FINE), _tanh(tl.div_rn(x2, beta2), FINE)
        return beta1 * t * s, (1.0 - t * t) * s + beta1 * t * (s * (1.0 - s)), beta2 * u, 1.0 - u * u
    else:
        value, slope = act(x1, ACT, FINE)
        return value, slope, x2, tl.full(x2.shape, 1.0, tl.float32)


@triton.jit
def load(at, mask):
    """Load as FP32, with 0 where the mask is false."""
    if mask is None:
        return tl.load(at).to(tl.float32)
    else:
        return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_biased(rows, bias, c, mask):
    """Return columns c of rows of x with their bias added, rounded as if the sum had been written."""
    value = load(rows + c, mask)
    if bias is not None:
        value = rounded(value + load(bias + c, mask), rows.dtype.element_ty)
    return value


@triton.jit
def load_grad(dy, stride, scales, r, c, rows, inside, TYPE: tl.constexpr):
    """Return dy at rows r [R], columns c (1, C) or (R, C), times the scales of the rows, rounded."""
    grad = load(dy + r[:, None] * stride + c, inside)
    if scales is not None:
        grad = rounded(grad * load(scales + r, rows)[:, None], TYPE)
    return grad


@triton.jit
def normalised(x, mu, rs, r, c, rows, stride, inside):
    """Return rs · (x - mu)."""
    value = load(x + r[:, None] * stride + c, inside)
    if mu is not None:
        value = value - load(mu + r, rows)[:, None]
    return load(rs + r, rows)[:, None] * value


@triton.jit
def produce(x, given, r, c, M, K, stride, SOURCE: tl.constexpr, EVEN: tl.constexpr):
    """Return what the source writes at rows r [R], columns c (1, C) or (R, C), as FP32; 0 outside of (M, K)."""
    KIND: tl.constexpr = SOURCE[0]
    HOW: tl.constexpr = SOURCE[1]
    rows = None if EVEN else r < M
    inside = None if EVEN else (r < M)[:, None] & (c < K)
    at = r[:, None] * stride
    TYPE: tl.constexpr = x.dtype.element_ty
    FINE: tl.constexpr = tl.float32 == TYPE
    if KIND == "norm":
        cols = None if EVEN else c < K
        g = load(given[3] + c, cols)
        if HOW:
            g = g + 1.0
        value = normalised(x, given[1], given[2], r, c, rows, stride, inside) * g
        if given[4] is not None:
            value = value + load(given[4] + c, cols)
    elif KIND == "norm_gamma":
        value = normalised(x, given[1], given[2], r, c, rows, stride, inside)
        value = load(given[3] + r[:, None] * given[4] + c, inside) * value
    elif KIND == "activation":
        value = load_biased(x + at, given[1], c, inside)
        if SOURCE[2]:
            second = load_biased(x + at, given[1], c + K, inside)
            value, _slope, second, _flat = gates(value, second, given[2], given[3], given[4], HOW, FINE)
            value = value * second
        else:
            value, _slope = act(value, HOW, FINE)
        if given[5] is not None:
            value = rounded(value, TYPE) * load(given[5] + r, rows)[:, None]
    else:
        tl.static_assert(KIND == "activation_backward")
        _value, slope = act(load_biased(x + at, given[1], c, inside), HOW, FINE)
        value = load_grad(given[6], given[7], given[5], r, c, rows, inside, TYPE) * slope
    if KIND != "norm_gamma":
        value = rounded(value, TYPE)
    if inside is not None:
        value = tl.where(inside, value, 0.0)
    return value


@triton.jit
def produce_halves(x, given, r, c, M, N, stride, ACT: tl.constexpr, EVEN: tl.constexpr):
    """Return the gradients of a gated activation at columns c < N and c + N, in the dtype of x; 0 outside of (M, N)."""
    TYPE: tl.constexpr = x.dtype.element_ty
    rows = None if EVEN else r < M
    inside = None if EVEN else (r < M)[:, None] & (c < N)
    at = x + r[:, None] * stride
    x1 = load_biased(at, given[1], c, inside)
    x2 = load_biased(at, given[1], c + N, inside)
    grad = load_grad(given[6], given[7], given[5], r, c, rows, inside, TYPE)
    FINE: tl.constexpr = tl.float32 == TYPE
    first, slope, second, second_slope = gates(x1, x2, given[2], given[3], given[4], ACT, FINE)
    return narrow(grad * slope * second, TYPE), narrow(grad * first * second_slope, TYPE)


@triton.jit
def larger(first, second):
    """Return the larger magnitudes of two tiles, as FP32; of NaN and a number, the number."""
    return tl.maximum(tl.abs(first.to(tl.float32)), tl.abs(second.to(tl.float32)))


@triton.jit
def load_input(x, given, r, c, M, K, stride, SOURCE: tl.constexpr, EVEN: tl.constexpr, ONCE: tl.constexpr):
    """Return the tile of x, or of what the source makes of it, as FP32; 0 outside of (M, K)."""
    if SOURCE is None:
        return load_tile(x, r, c, M, K, stride, EVEN, ONCE)
    else:
        return produce(x, given, r, c[None, :], M, K, stride, SOURCE, EVEN)


@triton.jit
def load_halves(x, given, r, c, M, K, stride, SOURCE: tl.constexpr, EVEN: tl.constexpr, ONCE: tl.constexpr):
    """Return the two tiles of "halves", or else the tile of `load_input` twice. Halves are in the dtype of x, which
    takes fewer registers."""
    if SOURCE is not None and SOURCE[0] == "halves":
        ACT: tl.constexpr = SOURCE[1]  # an element of a tuple is no argument before Triton 3.7
        return produce_halves(x, given, r, c[None, :], M, K // 2, stride, ACT, EVEN)
    else:
        value = load_input(x, given, r, c, M, K, stride, SOURCE, EVEN, ONCE)
        return value, value


@triton.jit
def store_sums(given, value, row, c, K, SOURCE: tl.constexpr):
    """Store the column sums of the tile in row `row` of tiles as a row of the partial sums (tiles, K), if wanted."""
    if SOURCE is not None and given[0] is not None:
        tl.store(given[0] + row * K + c, tl.sum(value, 0), mask=c < K)


class Input(NamedTuple):
    """An `Input` is what a launch hands to its kernels: x (M, …), whose rows are contiguous, and the source."""

    x: torch.Tensor
    M: int
    K: int
    kind: tuple[Any, ...] | None = None
    arguments: tuple[Any, ...] = ()
    sums: torch.Tensor | None = None  # FP32 column sums of the result go here, cast to its dtype

    def given(self, partials: torch.Tensor | None = None) -> tuple[Any, ...] | None:
        return None if self.kind is None else (partials, *self.arguments)

    def columns(self) -> int:
        """Return how many columns the programs share: K, or half of it if each program takes two tiles."""
        return self.K // 2 if self.kind is not None and self.kind[0] == "halves" else self.K

    def is_wide(self) -> bool:
        """Return whether a tile is made of two tiles of x, as it is for halves and for a gated activation."""
        return self.kind is not None and (self.kind[0] == "halves" or self.kind[::2] == ("activation", True))

    def partials(self, tiles: int) -> torch.Tensor | None:
        """Return the tensor that `store_sums` writes, for this many rows of tiles, or None."""
        return None if self.sums is None else self.x.new_empty((tiles, self.K), dtype=torch.float32)


# A quantization computes a source "inside" each of its passes, and writes nothing; in the "first" of two, which writes
# it for the second to read; or "before", by a launch of the source's own.
SourceMode = Literal["inside", "first", "before"]

_ACTIVATIONS = ("activation", "gradient", "gated", "gated gradient", "gated gradient, sums")
_INSIDE: dict[str, SourceMode] = {"norm": "inside", **dict.fromkeys(_ACTIVATIONS, "inside"), "gradient, sums": "before"}
_WRITTEN: dict[str, SourceMode] = {"norm": "inside", **dict.fromkeys((*_ACTIVATIONS, "gradient, sums"), "first")}
_BEFORE: dict[str, SourceMode] = {"norm": "inside", **dict.fromkeys((*_ACTIVATIONS, "gradient, sums"), "before")}

# For each quantization and kind of source this has the fastest way, as measured on an H200 (`dev/log/operations.md`).
# A norm is cheap. An activation pays inside if it is computed once; of those that are computed twice only a gated
# gradient does, under a scale that needs no second look at rows and columns. A gradient with sums also holds the
# partial sums of a tile; two halves under 1x128 scales hold too much of everything.
SOURCE_MODES: dict[str, dict[str, SourceMode]] = {
    "delayed": _INSIDE,
    "current": _WRITTEN | {"gated gradient": "inside", "gated gradient, sums": "inside"},
    "block": _INSIDE | {"gated gradient": "before", "gated gradient, sums": "before"},
    "blocks of 32": _INSIDE,
    "rowwise": _WRITTEN,
    "rows": _INSIDE | {"gated gradient": "before", "gated gradient, sums": "before"},  # row-wise alone
    "long rows": _BEFORE,
}


def source_mode(x: torch.Tensor | SourceCall, quantization: str, tile: int = 0) -> SourceMode:
    """Return how a quantization takes in its input, by `SOURCE_MODES`. It is "before" for a tensor, for an empty
    source, and for one whose halves do not make tiles this wide."""
    if not isinstance(x, SourceCall) or 0 in x.shape:
        return "before"
    kind = source_kind(x)
    if kind.startswith("gated gradient") and (tile == 0 or x.shape[-1] % (2 * tile)):
        return "before"
    return SOURCE_MODES[quantization][kind]


def source_kind(made: SourceCall) -> str:
    """Return the key of `SOURCE_MODES` for a source."""
    if made.source == "norm":
        return "norm"
    if made.source == "activation":
        return "gated" if is_gated(made.args[2]) else "activation"
    kind = "gated gradient" if is_gated(made.args[3]) else "gradient"
    return kind if made.sums is None else f"{kind}, sums"


def read(x: torch.Tensor | SourceCall, mode: SourceMode = "before") -> Input:
    """Return the input of a tensor, or of a source, which is written first if `mode` is "before"."""
    if isinstance(x, SourceCall):
        if mode != "before":
            return sourced(x)
        x = x.tensor()
    x = as_rows(x)
    return Input(x, *x.shape)


def sourced(made: SourceCall) -> Input:
    """Return the input of a source that the kernel computes as it reads."""
    args, (*_, K) = made.args, made.shape
    if made.source == "norm":
        x, mu, rs, gamma, beta, zero_centered, rms = args
        kind: tuple[Any, ...] = ("norm", bool(zero_centered))
        arguments: tuple[Any, ...] = (None if rms else mu, rs, gamma, beta)
    elif made.source == "activation":
        x, bias, name, params, scales = args
        kind, arguments = ("activation", *_act(name)), (bias, *_three(params), _flat(scales))
    else:
        dy, x, bias, name, params, scales = args
        dy = as_rows(dy)
        act, gated = _act(name)
        kind = ("halves" if gated else "activation_backward", act)
        arguments = (bias, *_three(params), _flat(scales), dy, dy.stride(0))
    x = as_rows(x)
    dense = tuple(a.contiguous() if isinstance(a, torch.Tensor) and a.dim() == 1 else a for a in arguments)
    return Input(x, x.shape[0], K, kind, dense, made.sums)


def _flat(scales: torch.Tensor | None) -> torch.Tensor | None:
    return None if scales is None else scales.reshape(-1)


def _act(name: str) -> tuple[str, bool]:
    """Return the name by which `gates` or `act` knows an activation, and whether it is gated."""
    return GATED.get(name, name), is_gated(name)


def _three(params: Any) -> tuple[float, ...]:
    return (*map(float, params), 0.0, 0.0, 0.0)[:3]
