"""Pack a folder of loose test vectors (a manifest.json and many .npz files) into one file, vectors.npz.

    python -m tests.pack_vectors [folder]

The same folder gives the same bytes. `vectors.py` describes the packed file and reads it.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from tests.vectors import PACK, expected_key, input_key

ROOT = Path(__file__).resolve().parents[1]


def vectors_dir() -> Path:
    """The folder of loose vectors: in the tests, or beside the checkout."""
    places = (ROOT / "tests" / "vectors", ROOT.parent / "shared" / "vectors")
    for place in places:
        if (place / "manifest.json").is_file():
            return place
    raise FileNotFoundError(f"no manifest.json in {' or '.join(map(str, places))}: give the folder as an argument")


def collect(folder: Path) -> dict[str, np.ndarray]:
    """Every array of the folder by its key in the pack."""
    text = (folder / "manifest.json").read_bytes()
    arrays = {"manifest": np.frombuffer(text, np.uint8)}
    for entry in json.loads(text)["vectors"]:
        with np.load(folder / entry["files"]["input"]) as loose:
            arrays[input_key(entry)] = loose["x"]
        with np.load(folder / entry["files"]["expected"]) as loose:
            if set(loose.files) != set(entry["arrays"]):
                raise ValueError(f"{entry['name']}: file has {loose.files}, manifest says {list(entry['arrays'])}")
            arrays |= {expected_key(entry, array): loose[array] for array in loose.files}
    return arrays


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="where manifest.json is")
    folder = parser.parse_args().folder or vectors_dir()
    arrays = collect(folder)
    np.savez_compressed(PACK, **arrays)  # type: ignore[arg-type]  # the stub takes a key for `allow_pickle`
    print(f"{PACK}: {len(arrays)} arrays, {PACK.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
