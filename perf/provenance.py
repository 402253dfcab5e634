"""What stands beside every number: the command, the versions, the machine, the date."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

_PACKAGES = ("torch", "transformers", "numba", "nvidia-pytriton", "tritonclient", "numpy")


def provenance() -> str:
    """A Markdown paragraph."""
    command = shlex.join(["python", *(os.path.relpath(sys.argv[0]), *sys.argv[1:])])
    versions = ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return (
        f"`{command}` on {datetime.date.today().isoformat()}; Python {platform.python_version()}, {versions}; "
        f"{_processor()}, {len(os.sched_getaffinity(0))} cores; GPU: {gpu}"
    )


def publish(lines: Sequence[str], output: Path | None) -> None:
    """Prints a Markdown table's lines with their provenance; writes them to the file as well, if there is one."""
    text = "\n".join(lines) + f"\n\n{provenance()}\n"
    print(text)
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _processor() -> str:
    flags, model = "", platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            model = value.strip()
        if key.strip() == "flags":
            flags = value
    simd = next((flag for flag in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if flag in flags.split()), "")
    return f"{model} ({simd})" if simd else model
