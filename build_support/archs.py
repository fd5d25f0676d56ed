"""TORCH_CUDA_ARCH_LIST to nvcc's -gencode flags."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from .errors import BuildError

DEFAULT = "8.0+PTX;9.0a"
MIN_CAPABILITY = (8, 0)
# The generation names that torch accepts in the variable.
NAMED = {
    "Ampere": "8.0;8.6+PTX",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell": "10.0;10.3;12.0;12.1+PTX",
}
PATTERN = re.compile(r"(?P<major>\d+)\.(?P<minor>\d)(?P<feature>[af]?)(?P<ptx>\+PTX)?")


@dataclass(frozen=True)
class Arch:
    """One entry: machine code for `sm`, and also PTX of `ptx` when that is not empty."""

    sm: str
    ptx: str = ""

    def flags(self) -> list[str]:
        flags = [f"-gencode=arch=compute_{self.sm},code=sm_{self.sm}"]
        if self.ptx:
            flags.append(f"-gencode=arch=compute_{self.ptx},code=compute_{self.ptx}")
        return flags


def parse(text: str, known: set[str]) -> list[Arch]:
    """Arch entries of a list such as "8.0 9.0a+PTX"; `known` holds nvcc's numbers ("80", "90").

    9.0 is compiled as 9.0a: the same cards run it, and only 9.0a has wgmma and TMA. Its PTX stays
    plain compute_90, because PTX of 9.0a runs on no later card.
    """
    for name, entries in NAMED.items():
        text = re.sub(rf"\b{name}(\+PTX)?\b", entries, text)
    archs = []
    for entry in re.split(r"[;,\s]+", text.strip(";, \t\n")):
        match = PATTERN.fullmatch(entry)
        if match is None:
            raise BuildError(
                f"TORCH_CUDA_ARCH_LIST: {entry!r} is no architecture: write entries such as "
                '"8.0", "9.0a" or "8.0+PTX", separated by semicolons.'
            )
        major, minor = int(match["major"]), int(match["minor"])
        number, feature = f"{major}{minor}", match["feature"]
        if (major, minor) < MIN_CAPABILITY:
            raise BuildError(
                f"TORCH_CUDA_ARCH_LIST: {entry} is not supported, flash_cuda needs compute "
                f'capability 8.0 or newer: remove it, for example TORCH_CUDA_ARCH_LIST="{DEFAULT}".'
            )
        if number not in known or (feature and major < 9):
            newest = ", ".join(f"{n[:-1]}.{n[-1]}" for n in sorted(known, key=int) if int(n) >= 80)
            raise BuildError(
                f"TORCH_CUDA_ARCH_LIST: {entry} is not known to this nvcc (it knows {newest}): "
                "remove it, or set CUDA_HOME to a newer toolkit of the same CUDA major version."
            )
        sm = "90a" if (number, feature) == ("90", "") else number + feature
        archs.append(Arch(sm, number + feature if match["ptx"] else ""))
    return list(dict.fromkeys(archs))


def local_list(capabilities: list[tuple[int, int]], known: set[str]) -> str:
    """The list for the GPUs of this machine, or DEFAULT when none of them can be compiled for."""
    usable = [c for c in sorted(set(capabilities)) if c >= MIN_CAPABILITY]
    usable = [f"{major}.{minor}" for major, minor in usable if f"{major}{minor}" in known]
    return ";".join("9.0a" if arch == "9.0" else arch for arch in usable) or DEFAULT


def choose(torch, known: set[str], environ=os.environ) -> tuple[list[Arch], str]:
    """The architectures to build for and, for the build log, where they come from."""
    wish = environ.get("TORCH_CUDA_ARCH_LIST", "").strip(";, ")
    if wish and wish.lower() != "native":
        return parse(wish, known), f"TORCH_CUDA_ARCH_LIST={wish}"
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    capabilities = [torch.cuda.get_device_capability(i) for i in range(devices)]
    chosen = local_list(capabilities, known)
    seen = ", ".join(f"{major}.{minor}" for major, minor in capabilities) or "none"
    return parse(chosen, known), f"{chosen} (GPUs here: {seen}; TORCH_CUDA_ARCH_LIST not set)"
