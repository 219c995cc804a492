"""This module asks the machine under a command for its device, its versions, and the peak of the memory in use."""

import os
import platform
import resource
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from mezzotint.trainer.console import CommandError

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def find_device(name: str) -> torch.device:
    """Return the device of this name; `auto` means the GPU if there is one."""
    if name not in ("auto", "cpu", "cuda"):
        raise CommandError(f"--device is {name!r}: give auto, cpu or cuda")
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise CommandError("--device cuda: PyTorch finds no CUDA GPU here; give --device cpu")
    return torch.device("cuda" if has_cuda and name != "cpu" else "cpu")


def check_compiler(device: torch.device) -> None:
    """Raise an error if torch.compile has no C++ compiler for the CPU; its own error comes
    after a minute, and is long."""
    if device.type == "cpu" and find_cpp() is None:
        raise CommandError("torch.compile needs a C++ compiler for the CPU: install g++, or give --no-compile")


def find_cpp() -> str | None:
    names = (os.environ.get("CXX"), "g++", "clang++", "c++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def versions() -> dict[str, str | None]:
    """Return the versions of the software that computes, or None for what is missing."""
    cuda = torch.version.cuda
    return {
        "python": platform.python_version(),
        "mezzotint": _version_of("mezzotint"),
        "torch": torch.__version__,
        "triton": _version_of("triton"),
        "CUDA of torch": cuda,
        "driver": _driver() if cuda is not None else None,
        "C++ compiler": find_cpp(),
    }


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def has_nvidia_driver() -> bool:
    """Return whether the kernel has NVIDIA's module, whatever build of PyTorch is installed."""
    return _driver() is not None


def _driver() -> str | None:
    """Return the version that the NVIDIA kernel module reports, or None without one."""
    try:
        text = Path("/sys/module/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    return text.strip()


def reset_peak_memory(device: torch.device) -> None:
    """Start measuring the peak of the memory in use from now on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        _CLEAR.write_text("5")
    except OSError:  # not Linux, or not allowed: the peak is then that of the whole process
        return


def peak_memory(device: torch.device) -> int:
    """Return a peak in bytes: of the memory that the GPU's allocator gave out, or of a
    CPU process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        lines = _STATUS.read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return used if sys.platform == "darwin" else used * 1024
