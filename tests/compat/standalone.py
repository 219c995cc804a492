"""A process that knows PyTorch alone: it runs saved programs, and compares what they give with what it was told.

python standalone.py folder       `<name>.export.pt2` or `<name>.aoti.pt2`, and `<name>.pt` with inputs and results
"""

import sys
from pathlib import Path
from typing import Any

import torch


def load(file: Path) -> Any:
    if file.name.endswith(".aoti.pt2"):
        return torch._inductor.aoti_load_package(str(file))
    return torch.export.load(file).module()


def main(folder: Path) -> None:
    for file in sorted(folder.glob("*.pt2")):
        call = load(file)
        for inputs, wanted in torch.load(file.with_name(file.name.split(".")[0] + ".pt")):
            with torch.no_grad():
                got = call(*inputs)
            assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), file.name
            assert torch.equal(got, wanted), f"{file.name}: {(got != wanted).sum()} of {got.numel()} differ"
        print(file.name)
    assert not [name for name in sys.modules if name.split(".")[0] == "mezzotint"]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
