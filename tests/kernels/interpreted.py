"""Kernels in Triton's interpreter, on the CPU.

The interpreter is chosen before Triton is imported: another process. It is started once, and each call runs in a fork
of it, so that nothing is imported twice and what a call patches is gone with it.

    def main(part: str) -> None: ...            # of a module: fails where a kernel differs from its reference

    def test_interpreted() -> None:
        run_interpreted(main, "small shapes")
"""

import atexit
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run_interpreted(function: Callable[..., None], *arguments: str) -> None:
    """Run a function of a module in the interpreter's process; the test fails with what it says there."""
    process = _start()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps([function.__module__, function.__name__, arguments]) + "\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    assert answer, "the interpreter's process has ended"
    code, said = json.loads(answer)
    assert code == 0, said


@cache
def _start() -> subprocess.Popen[str]:
    """Return the process, which ends when its input is closed."""
    command = [sys.executable, "-W", "ignore", "-m", __name__]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    made = subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(made.communicate)  # closes its input, and waits
    return made


def _run_in_a_fork(module: str, name: str, arguments: list[str]) -> tuple[int, str]:
    """Return the exit code, and all that was printed."""
    with tempfile.TemporaryFile() as printed:
        child = os.fork()
        if child == 0:
            os.dup2(printed.fileno(), 1)
            os.dup2(printed.fileno(), 2)
            try:
                getattr(importlib.import_module(module), name)(*arguments)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        printed.seek(0)
        return os.waitstatus_to_exitcode(status), printed.read().decode(errors="replace")


def _patch_the_language_once() -> None:
    """Let a function that a kernel calls run with the language as the kernel's launch has patched it.

    The interpreter looks through all of `triton.language` again at every such call, which is most of its time.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    @cache
    def languages_of(fn: Callable[..., Any]) -> list[Any]:
        return [value for value in fn.__globals__.values() if value is tl or value is tl.core]

    def patch_if_needed(fn: Callable[..., Any]) -> Any:
        if any(tl.core.is_builtin(language.load) for language in languages_of(fn)):
            return patch(fn)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_if_needed


def _serve() -> None:
    import pytest  # noqa: F401
    import torch

    import mezzotint  # noqa: F401

    _patch_the_language_once()
    torch.set_num_threads(1)  # a process with more threads than one is not forked well
    for line in sys.stdin:
        print(json.dumps(_run_in_a_fork(*json.loads(line))), flush=True)


if __name__ == "__main__":
    _serve()
