"""FP8 with one scale per row, which has no vectors: the formula in numpy."""

from collections.abc import Iterator

from mezzotint.kernels.float8_rowwise import float8_rowwise_quantize
from tests import exact
from tests.conformance import DTYPES, FP8, Row, count
from tests.values import CONTENTS, fill


def rows(device: str) -> Iterator[Row]:
    for content in CONTENTS:
        items = mismatches = 0
        for elem, dtype in FP8.items():
            for pow2 in (False, True):
                for x in (fill((37, 53), high, content, 0) for high in DTYPES.values()):
                    out = float8_rowwise_quantize(x.to(device), None, None, dtype, pow2, 0.0, True, True)
                    for side, buffers in ((x, out[:2]), (x.t(), out[2:])):
                        want = exact.quantize_rows_fp8(side.float().contiguous().numpy(), elem, pow2, 0.0)
                        for pair in zip(buffers, want, strict=True):
                            compared, wrong = count(*pair)
                            items, mismatches = items + compared, mismatches + wrong
        yield Row("float8_rowwise", f"{content}, 12 cases", "numpy", items, mismatches)
