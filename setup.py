"""The compiled half of flash_cuda; everything that is not about compiling is in pyproject.toml.

Variables: FLASH_CUDA_BUILD_KERNELS=0 (CPU path alone), TORCH_CUDA_ARCH_LIST, MAX_JOBS, CUDA_HOME,
FLASH_CUDA_IGNORE_SYSTEM_TOOLKIT=1 (take nvcc from PyPI's packages). docs/install.md explains them.
"""

import os
import sys

from setuptools import Extension, setup

from build_support import archs, checks, flags, toolkit

NAME = "flash_cuda._C"
LAB = "flash_cuda._lab"
COMPILING = {"build", "build_ext", "bdist_wheel", "editable_wheel", "install", "develop"}


def log(line):
    print(line, flush=True)


def build_command(cpp_extension):
    class BuildKernels(cpp_extension.BuildExtension):
        def finalize_options(self):
            super().finalize_options()
            # distutils would keep what was compiled with other settings; ninja knows better.
            self.force = True
            if self.editable_mode:
                # In setuptools' temporary folder every editable install would compile it all again.
                self.build_temp = os.path.join("build", "editable")

    return BuildKernels


def schemas_extension(cpp_extension):
    return cpp_extension.CppExtension(
        NAME,
        flags.SCHEMAS,
        include_dirs=[flags.INCLUDE],
        extra_compile_args={"cxx": flags.CXX},
        py_limited_api=True,
    )


def cuda_extension(cpp_extension, name, sources, found, chosen):
    gencodes = sorted({flag for arch in chosen for flag in arch.flags()})
    extension = cpp_extension.CUDAExtension(
        name,
        sources,
        include_dirs=[flags.INCLUDE, str(found.include)],  # before CUDA_HOME/include
        extra_compile_args={
            "cxx": flags.CXX_WITH_KERNELS,
            "nvcc": [*flags.NVCC, *gencodes],
        },
        py_limited_api=True,
    )
    # By its path: -lcudart needs a libcudart.so, which a toolkit from PyPI does not have.
    extension.libraries.remove("cudart")
    extension.extra_link_args.append(str(found.cudart))
    return extension


def compiled():
    """The extensions and their build command; every reason not to build is said here."""
    checks.require_python()
    torch = checks.require_torch()
    checks.require_cxx()
    kernels = checks.want_kernels(torch.version.cuda, torch.__version__)
    log(f"flash_cuda: torch {torch.__version__}, CUDA {torch.version.cuda}")
    if kernels:
        found = toolkit.require(torch.version.cuda, torch.__version__, log)
        chosen, origin = archs.choose(torch, found.known_archs())
        os.environ["MAX_JOBS"] = str(checks.job_count())
        # cpp_extension reads it when it is imported, and guesses worse.
        os.environ["CUDA_HOME"] = str(found.home)
        log(f"flash_cuda: architectures {origin}, MAX_JOBS={os.environ['MAX_JOBS']}")
    from torch.utils import cpp_extension

    cpp_extension.min_supported_cpython = flags.LIMITED_API
    if kernels:
        extensions = [
            cuda_extension(cpp_extension, name, sources, found, chosen)
            for name, sources in (
                (NAME, flags.op_sources() + flags.launch_sources()),
                (LAB, flags.lab_sources()),
            )
        ]
    else:
        log("flash_cuda: no kernels in this build, only the op schemas (CPU path)")
        extensions = [schemas_extension(cpp_extension)]
    return {"ext_modules": extensions, "cmdclass": {"build_ext": build_command(cpp_extension)}}


if COMPILING & set(sys.argv):
    what = compiled()
else:  # metadata and sdist need neither torch nor a compiler
    what = {"ext_modules": [Extension(NAME, flags.SCHEMAS, py_limited_api=True)]}

setup(options={"bdist_wheel": {"py_limited_api": "cp310"}}, **what)
