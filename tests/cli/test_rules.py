"""`mezzotint train --rules` and `mezzotint plan --rules`: rules per layer and schedules of a file."""

from pathlib import Path

import pytest

from mezzotint.recipe import DelayedScaling, Rules, Schedule
from tests.cli.tools import SIZES, fails, losses, read, works

Capture = pytest.CaptureFixture[str]
RULES = Rules([("layers.0.*", None), ("*.fc2", DelayedScaling(amax_history_len=4)), ("*", "mxfp8")])


def write(folder: Path, given: Rules | Schedule | str, name: str = "rules.toml") -> str:
    path = folder / name
    path.write_text(given if isinstance(given, str) else given.as_toml())
    return f"--rules={path}"


def test_a_run_under_a_schedule(capsys: Capture, tmp_path: Path, options: tuple[str, ...]) -> None:
    """Eight steps: three under rules, two in MXFP8, the rest in high precision. Each phase computes as a run of its
    kind; a resumed run takes the recipe of its step, from what it has kept of the file."""
    schedule = Schedule([(0, RULES), (3, "mxfp8"), (5, None)])
    rules = write(tmp_path, schedule)
    works(capsys, "train", *options, rules)
    run = tmp_path / "run"
    made = losses(run)
    assert read(run / "result.json")["recipe"] == "rules"
    alone = tmp_path / "alone"
    works(capsys, "train", *options, write(tmp_path, RULES, "alone.toml"), f"--out={alone}")
    assert made[:3] == losses(alone)[:3]
    assert made[3] != losses(alone)[3]
    stopped = tmp_path / "stopped"
    works(capsys, "train", *options, rules, f"--out={stopped}", "--steps=8", "--keep=9")
    for path in (stopped / "checkpoints").glob("*8*"):
        path.rename(tmp_path / path.name)
    (stopped / "result.json").unlink()
    write(tmp_path, "changed since")
    works(capsys, "train", "--resume", f"--out={stopped}")
    assert losses(stopped) == made


def test_what_a_file_may_not_say(capsys: Capture, tmp_path: Path, options: tuple[str, ...]) -> None:
    told = {
        "[[rule": "is no TOML",
        "steps = 3": "has neither [[rule]] nor [[schedule]]",
        '[[rule]]\nmatch = "*"': "rule 1 of {} has no recipe: give one of delayed,",
        '[[rule]]\nmatch = "*"\nrecipe = "fp9"': "rule 1 of {} has recipe 'fp9'",
        '[[rule]]\nmatch = "*"\nrecipe = "mxfp8"\nstep = 3': "rule 1 of {} has 'step': it takes match, options, recipe",
        '[[rule]]\nrecipe = "mxfp8"': "the pattern of rule 1 is ''",
        '[[rule]]\nmatch = "*"\nrecipe = "mxfp8"\noptions = { speed = 3 }': "rule 1 of {}: mxfp8 has 'speed'",
        '[[rule]]\nmatch = "*"\nrecipe = "delayed"\noptions = { margin = "a" }': "rule 1 of {}: margin is 'a'",
        '[[rule]]\nmatch = "*"\nrecipe = "mxfp8"\noptions = { fp8_format = "E9" }': "fp8_format is 'E9'",
        '[[rule]]\nmatch = "head"\nrecipe = "mxfp8"\n[[rule]]\nmatch = "*"\nrecipe = "mxfp8"': "'head' matches nothing",
        '[[schedule]]\nstep = 3\nrecipe = "mxfp8"': "the phases begin at steps [3]",
        '[[schedule]]\nrecipe = "mxfp8"': "the step of phase 1 is None",
    }
    for number, (text, message) in enumerate(told.items()):
        rules = write(tmp_path, text, f"{number}.toml")
        assert message.format(tmp_path / f"{number}.toml") in fails(capsys, "train", *options, rules), text
    assert not (tmp_path / "run").exists()
    rules = write(tmp_path, RULES)
    assert "--rules and --recipe nvfp4: give one of them" in fails(capsys, "train", *options, rules, "--recipe=nvfp4")
    assert "cannot be read: No such file" in fails(capsys, "train", *options, "--rules=/nowhere")
    works(capsys, "train", *options, rules, "--steps=1")
    other = write(tmp_path, Rules([("*", "mxfp8")]), "other.toml")
    assert "--rules of another file" in fails(capsys, "train", "--resume", f"--out={tmp_path / 'run'}", other)


def test_a_plan_of_rules(capsys: Capture, tmp_path: Path) -> None:
    """Rules that give all layers one recipe need what that recipe needs; a mixture lies between."""
    sizes = [*SIZES, "--json"]
    one = write(tmp_path, Rules([("*", "mxfp8")]), "one.toml")
    half = write(tmp_path, Rules([("layers.0.*", None), ("*", "mxfp8")]), "half.toml")
    plain = read_plan(works(capsys, "plan", "llama3-8b", *sizes, "--recipes=bf16,mxfp8"), tmp_path)
    assert read_plan(works(capsys, "plan", "llama3-8b", *sizes, one), tmp_path)["rules"] == plain["mxfp8"]
    mixed = read_plan(works(capsys, "plan", "llama3-8b", *sizes, half), tmp_path)["rules"]
    assert plain["mxfp8"]["saved"] < mixed["saved"] < plain["bf16"]["saved"]
    phases = write(tmp_path, Schedule([(0, "mxfp8"), (5, None)]), "phases.toml")
    found = read_plan(works(capsys, "plan", "llama3-8b", *sizes, phases), tmp_path)
    assert found == {"from step 0": plain["mxfp8"], "from step 5": plain["bf16"]}
    assert "--rules and --recipes: give one" in fails(capsys, "plan", "llama3-8b", *sizes, phases, "--recipes=mxfp8")
    wrong = write(tmp_path, Rules([("layers.7.*", None), ("*", "mxfp8")]), "wrong.toml")
    assert "the rule 'layers.7.*' matches nothing" in fails(capsys, "plan", "llama3-8b", *sizes, wrong)


def read_plan(printed: str, folder: Path) -> dict[str, dict[str, int]]:
    (folder / "plan.json").write_text(printed)
    return read(folder / "plan.json")["recipes"]
