"""PEP 517 backend: setuptools, plus an nvcc from PyPI where the machine has none that fits.

pip asks for these requirements after it has installed those of pyproject.toml, so torch, whose CUDA
release decides which nvcc is needed, can be asked.
"""

from __future__ import annotations

from . import prerequisites  # noqa: F401  before setuptools: it says what is missing

# isort: split
from setuptools import build_meta
from setuptools.build_meta import (  # noqa: F401  the hooks that stay as they are
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

from .requirements import of_toolkit


def get_requires_for_build_wheel(config_settings=None) -> list[str]:
    return build_meta.get_requires_for_build_wheel(config_settings) + of_toolkit(print)


def get_requires_for_build_editable(config_settings=None) -> list[str]:
    return build_meta.get_requires_for_build_editable(config_settings) + of_toolkit(print)
