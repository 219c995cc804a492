"""Export and verification of a checkpoint of 2 GB: they hold no more than one of its files, and a fifth of that."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mezzotint.files import write_json
from mezzotint.serving.published import MODEL_CONFIG
from mezzotint.serving.shards import ShardWriter, StoredSpec

ROOT = Path(__file__).resolve().parents[2]
SHARD = 500 * 10**6
HIDDEN, FFN, LAYERS, VOCAB = 2048, 5632, 20, 32000

# In a process of its own, so that the peak is of this alone. What was imported and warm before does not count.
CODE = """
import contextlib, sys
from pathlib import Path
import torch
import mezzotint as mz
from mezzotint.serving.source import source_of_folder
from mezzotint.serving.verify import open_second, verify_source

def memory(which):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(which))

mz.Float8BlockQuantizer().quantize(torch.zeros(128, 128))
plain, out = Path(sys.argv[1]), Path(sys.argv[2])
with contextlib.suppress(OSError):  # from here on the peak is counted anew
    Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS")
report = mz.export(plain, "hf-fp8", out, max_shard_bytes=int(sys.argv[3]))
after_export = memory("VmHWM")
checks = list(verify_source(source_of_folder(plain), open_second(out)))
assert all(check.is_equal for check in checks) and len(checks) > 300
print(len(report.quantized), after_export - before, memory("VmHWM") - before)
"""


def weights() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
        shapes |= {f"{prefix}.self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"}
        shapes |= {f"{prefix}.mlp.{name}_proj.weight": (FFN, HIDDEN) for name in ("gate", "up")}
        shapes[f"{prefix}.mlp.down_proj.weight"] = (HIDDEN, FFN)
    return {**shapes, "lm_head.weight": (VOCAB, HIDDEN)}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_memory_is_that_of_one_file(tmp_path: Path) -> None:
    plain, shapes = tmp_path / "plain", weights()
    plain.mkdir()
    groups = [{name: StoredSpec(torch.bfloat16, shape)} for name, shape in shapes.items()]
    with ShardWriter(plain, groups, SHARD) as writer:
        for name, shape in shapes.items():
            writer.write(name, torch.randn(shape, dtype=torch.bfloat16))
        writer.finish()
    sizes = {"hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
    write_json(
        plain / MODEL_CONFIG, {"model_type": "llama", "num_attention_heads": 16, "num_key_value_heads": 16, **sizes}
    )
    assert sum(file.stat().st_size for file in plain.iterdir()) > 2 * 10**9
    command = [sys.executable, "-c", CODE, str(plain), str(tmp_path / "out"), str(SHARD)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    count, exported, verified = (int(word) for word in run.stdout.split())
    assert count == 7 * LAYERS
    print(f"more memory at the peak of export {exported / 1e6:.0f} MB, with verification {verified / 1e6:.0f} MB")
    assert exported <= verified <= 1.2 * SHARD
