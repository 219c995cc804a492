"""The quantization test vectors: inputs, and the bytes that other projects' reference code makes of them.

    for entry in load_manifest():
        x, expected = load(entry)       # expected["rowwise_data"], expected["rowwise_scale_inv"], ...

`vectors.npz` beside this file holds them all; `pack_vectors.py` made it from a folder of loose files.

    manifest                the manifest's JSON text, as uint8
    inputs/<input>/x        an input; several cases share one. bfloat16 is stored as its uint16 bits
    <case>/<array>          an expected array. FP8, E8M0 and packed FP4 are uint8, other scales float32
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

PACK = Path(__file__).with_name("vectors.npz")


def input_key(entry: dict[str, Any]) -> str:
    """Key of a case's input in the pack: `inputs/a.npz` in the manifest is `inputs/a/x`."""
    return entry["files"]["input"].removesuffix(".npz") + "/x"


def expected_key(entry: dict[str, Any], array: str) -> str:
    """Key of one expected array of a case in the pack."""
    return f"{entry['name']}/{array}"


@cache
def _pack() -> np.lib.npyio.NpzFile:
    return np.load(PACK)


@cache
def load_manifest() -> list[dict[str, Any]]:
    """One entry per case: name, format, options, content, shape, dtype, status, arrays, note, ..."""
    entries = json.loads(_pack()["manifest"].tobytes())["vectors"]
    if not entries:
        raise ValueError(f"{PACK} holds no test vectors: make it again with tests/pack_vectors.py")
    return entries


def load(entry: dict[str, Any]) -> tuple[torch.Tensor, dict[str, np.ndarray]]:
    """The input of a case in its real dtype, and the arrays expected for it; fresh copies on each call."""
    x = torch.from_numpy(_pack()[input_key(entry)])
    if entry["dtype"] == "bfloat16":
        x = x.view(torch.bfloat16)
    given = (str(x.dtype).removeprefix("torch."), list(x.shape))
    assert given == (entry["dtype"], entry["shape"]), f"{entry['name']}: the pack holds {given}"
    return x, {array: _pack()[expected_key(entry, array)] for array in entry["arrays"]}
