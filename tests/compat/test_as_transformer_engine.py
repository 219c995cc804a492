"""Mezzotint under Transformer Engine's names: what can be imported, what it is, and what is refused.

Each program runs in a process of its own, since the names stay in the process that has them.
"""

import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path

import pytest
import torch

import mezzotint as mz
from mezzotint.as_transformer_engine import __main__ as runner
from mezzotint.as_transformer_engine import absent, modules
from mezzotint.as_transformer_engine.grouped_linear import GroupedLinear
from mezzotint.as_transformer_engine.paths import BEHIND_A_NAME, PATHS, RENAMED, VERSION

ROOT = Path(__file__).resolve().parents[2]
SHIM = ROOT / "packages/transformer-engine-shim"
IMPORT = "import mezzotint.as_transformer_engine\n"


def run(
    *arguments: str, cwd: Path | None = None, path: tuple[Path, ...] = (), is_refused: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run Python with arguments; `path` goes before the project on its search path."""
    env = {"PYTHONPATH": ":".join(map(str, (*path, ROOT))), "PATH": "/usr/bin:/bin", "HOME": str(cwd or ROOT)}
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode != 0) == is_refused, done.stdout + done.stderr
    return done


def test_every_source_of_the_table_is_there() -> None:
    for source in {source for sources in PATHS.values() for source in sources}:
        import_module(source)
    for module, name in RENAMED.values():
        assert hasattr(import_module(module), name)
    assert set(PATHS) >= BEHIND_A_NAME


def test_the_version_is_that_of_the_names() -> None:
    assert f'"version": "{VERSION}"' in modules.FACTS.read_text(encoding="utf-8")
    assert f'version = "{VERSION}+mezzotint"' in (SHIM / "pyproject.toml").read_text(encoding="utf-8")


CLIENT = (
    f"""
VERSION = {VERSION!r}
"""
    + """
import sys
import transformer_engine.pytorch as te
import transformer_engine, transformer_engine_torch
from transformer_engine.common.recipe import DelayedScaling, Format
from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor
from transformer_engine.pytorch.newton_schulz import newton_schulz
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, fp8_autocast
import mezzotint
assert te.Linear is mezzotint.Linear and te.ops.Linear is mezzotint.ops.Linear
assert Float8Tensor is mezzotint.Float8Tensor and DelayedScaling is mezzotint.recipe.DelayedScaling
assert te.newton_schulz is newton_schulz is mezzotint.newton_schulz
assert transformer_engine_torch.DType is mezzotint.DType
assert transformer_engine.__version__ == VERSION
assert transformer_engine.__provided_by__ == f"mezzotint {mezzotint.__version__}"
assert transformer_engine.pytorch is te and "Linear" in dir(te)
import importlib.metadata, importlib.util
assert importlib.metadata.version("transformer_engine") == f"{VERSION}+mezzotint"
assert importlib.util.find_spec("transformer_engine.pytorch") is not None
assert not hasattr(te, "no_such_name")
try:
    from transformer_engine.pytorch import no_such_name
except ImportError:
    pass
else:
    raise AssertionError
try:
    import transformer_engine.jax
except ModuleNotFoundError:
    pass
else:
    raise AssertionError
print("as it should")
"""
)


def test_grouped_linear_saves_its_state_in_the_form_of_the_name() -> None:
    """And reads both forms, as the module of Mezzotint does."""
    recipe = mz.recipe.DelayedScaling(amax_history_len=4)
    ours, theirs = mz.GroupedLinear(2, 32, 32), GroupedLinear(2, 32, 32)
    theirs.load_state_dict(ours.state_dict())
    assert theirs.state_dict()["_extra_state"].numel() == 0  # nothing learnt
    assert not theirs.fp8_meta["fp8_checkpoint"]
    for module in (ours, theirs):
        torch.manual_seed(0)
        with mz.autocast(recipe=recipe):
            y = module(torch.randn(32, 32), [16, 16])
        y.sum().backward()
    state = theirs.state_dict()
    assert state["_extra_state"].dtype == torch.uint8
    assert theirs.fp8_meta["fp8_checkpoint"]
    assert theirs.fp8_meta["recipe"] == recipe
    read = mz.GroupedLinear(2, 32, 32)
    read.load_state_dict(state)
    assert torch.equal(read.get_extra_state(), ours.get_extra_state())
    again = GroupedLinear(2, 32, 32)
    again.load_state_dict(ours.state_dict())
    assert torch.equal(again.scale_fwd, ours.scale_fwd)
    again.fp8_meta["recipe"] = recipe
    assert again.fp8_meta["recipe"] is recipe


def test_one_process() -> None:
    assert run("-c", IMPORT + CLIENT).stdout == "as it should\n"


def test_a_program_unchanged(tmp_path: Path) -> None:
    """`python -m mezzotint.as_transformer_engine script.py` is as `python script.py`."""
    text = (
        CLIENT + "import beside\nassert __name__ == '__main__'\nprint(sys.argv, beside.x, sys.modules['__main__'].te)\n"
    )
    (tmp_path / "program").mkdir()
    (tmp_path / "program/script.py").write_text(text)
    (tmp_path / "program/beside.py").write_text("x = 5\n")
    script = str(tmp_path / "program/script.py")
    printed = run("-m", "mezzotint.as_transformer_engine", script, "--steps", "3", cwd=tmp_path).stdout
    assert printed.startswith(f"as it should\n[{script!r}, '--steps', '3'] 5 <module 'transformer_engine.pytorch'")
    inside = tmp_path / "program"
    printed = run("-m", "mezzotint.as_transformer_engine", "-m", "script", "x", cwd=inside).stdout
    assert f"{script!r}, 'x'] 5" in printed


def test_the_runner_says_how_it_is_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for arguments, code in ((["-h"], 0), (["--help"], 0), ([], 2), (["-m"], 2)):
        monkeypatch.setattr(sys, "argv", ["runner", *arguments])
        with pytest.raises(SystemExit) as left:
            runner.run_program()
        assert left.value.code == code
        assert "script.py ARGUMENTS" in capsys.readouterr()[code // 2]


def test_how_the_program_ends_is_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys\nsys.exit('no more tokens')\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["runner", str(tmp_path / "script.py")])
    with pytest.raises(SystemExit, match="no more tokens"):
        runner.run_program()


def test_nothing_more_is_imported() -> None:
    """The aliases import no counterpart, and no client, before a name is used."""
    code = (
        "import sys, mezzotint\nbefore = set(sys.modules)\n"
        "import mezzotint.as_transformer_engine, transformer_engine.pytorch.ops.basic, transformer_engine_torch\n"
        "new = {name for name in set(sys.modules) - before if not name.startswith('transformer_engine')}\n"
        "print(sorted(name for name in new if not name.startswith('mezzotint.as_transformer_engine')))\n"
    )
    allowed = {"fnmatch", "json", "json.decoder", "json.encoder", "json.scanner", "tomllib", "tomllib._parser"}
    assert {name for name in eval(run("-c", code).stdout) if not name.startswith("importlib.")} <= allowed | {
        *("tomllib._re", "tomllib._types", "_json", "zipfile", "csv", "_csv")
    }


@pytest.mark.slow
def test_another_one_that_is_imported_already_is_refused(tmp_path: Path) -> None:
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine/__init__.py").touch()
    done = run("-c", "import transformer_engine\n" + IMPORT, path=(tmp_path,), is_refused=True)
    assert f"transformer_engine is already imported, from {tmp_path}" in done.stderr
    run("-c", IMPORT + "import transformer_engine\nassert transformer_engine.__provided_by__", path=(tmp_path,))


@pytest.mark.slow
def test_the_shim(tmp_path: Path) -> None:
    """A wheel of the two packages and nothing else, whose modules are those of the alias."""
    build = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    project = tmp_path / "project"
    for file in [path for path in SHIM.rglob("*") if path.suffix in (".py", ".toml", ".md")]:
        (project / file.relative_to(SHIM)).parent.mkdir(parents=True, exist_ok=True)
        (project / file.relative_to(SHIM)).write_bytes(file.read_bytes())
    name = run("-c", build, str(tmp_path), cwd=project).stdout.splitlines()[-1]
    site = tmp_path / "site"
    with zipfile.ZipFile(tmp_path / name) as wheel:
        wheel.extractall(site)
        files = {each for each in wheel.namelist() if ".dist-info/" not in each}
        (description,) = [wheel.read(each).decode() for each in wheel.namelist() if each.endswith("/METADATA")]
    assert files == {"transformer_engine/__init__.py", "transformer_engine_torch/__init__.py"}
    assert "Requires-Dist: mezzotint" in description
    assert run("-c", CLIENT, path=(site,)).stdout == "as it should\n"

    parts = tmp_path / "other" / "transformer_engine_cu12-2.17.0.dist-info"
    parts.mkdir(parents=True)
    (parts / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer_engine_cu12\nVersion: 2.17.0\n")
    done = run("-c", "import transformer_engine", path=(site, tmp_path / "other"), is_refused=True)
    assert "transformer_engine_cu12 2.17.0 is installed beside" in done.stderr
    assert "pip uninstall transformer_engine_cu12" in done.stderr


def test_placeholders() -> None:
    path = "transformer_engine.pytorch.attention.FusedMLAQUpProjRopeQuant"
    made = absent.placeholder(path)
    assert made.__name__ == "FusedMLAQUpProjRopeQuant"
    assert not isinstance(3, made)
    assert not hasattr(made, "apply")
    assert isinstance(int | made, type(int | str))
    with pytest.raises(
        NotImplementedError, match=r"FusedMLAQUpProjRopeQuant: Mezzotint has no counterpart.*Use a Linear"
    ):
        made(1, x=2)
    with pytest.raises(NotImplementedError, match="'apply' of it"):
        made.apply  # noqa: B018
    with pytest.raises(NotImplementedError, match="no counterpart"):
        made["x"]
    own = type("Own", (made,), {})  # a class statement above it runs
    with pytest.raises(NotImplementedError, match="no counterpart"):
        own()


def test_a_name_of_neither_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"neither Transformer Engine .* nor Mezzotint has it"):
        modules.find("transformer_engine.pytorch", "no_such_name")


def test_every_reason_is_needed() -> None:
    missing = [
        f"{path}.{name}"
        for path, names in modules.upstream_names().items()
        for name in names
        if path in PATHS and modules.is_absent(path, name)
    ]
    for pattern in absent.reasons():
        assert [path for path in missing if absent.fnmatchcase(path, pattern)], f"{pattern} matches no absent name"
