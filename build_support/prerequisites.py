"""Imported by the backend before setuptools: a sentence where there would be a traceback."""

from __future__ import annotations

from importlib import metadata

from . import checks
from .errors import BuildError

MIN_SETUPTOOLS = (77, 0, 3)


def require_setuptools() -> None:
    try:
        found = metadata.version("setuptools")
    except metadata.PackageNotFoundError:
        found = "0"
    if tuple(int(part) for part in found.split(".")[:3] if part.isdigit()) < MIN_SETUPTOOLS:
        least = checks.dotted(MIN_SETUPTOOLS)
        what = f"setuptools {found} is too old" if found != "0" else "the build needs setuptools"
        raise BuildError(
            f'{what}: run `pip install "setuptools>={least}" wheel ninja`, or drop '
            "--no-build-isolation so that pip brings them for the build."
        )


checks.require_python()
require_setuptools()
