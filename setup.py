"""Adds compiled C kernels to the wheel; pyproject.toml describes the rest of the package.

The wheel of a Linux machine with a C compiler carries the C sources compiled for every level of
instruction sets of its kind of processor. Any other wheel carries only the sources, and fits every
machine. Editable installs compile at the first start.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))  # the build runs where recserve is not installed

from recserve.kernels.native import library as native_library  # noqa: E402

OLDEST_GLIBC = (2, 17)  # of the manylinux tags that every pip with Python 3.11 knows


class BuildWithLibraries(build_py):
    """Copies the package, and compiles the libraries into the copy."""

    def run(self) -> None:
        """Builds a wheel's content. An editable install has no content of its own."""
        super().run()
        if self.editable_mode:
            return
        packaged = Path(self.build_lib) / native_library.PACKAGED.relative_to(ROOT.resolve())
        shutil.rmtree(packaged, ignore_errors=True)  # of an earlier build
        compiler = native_library.find_compiler()
        if compiler is None or platform.system() != "Linux":
            self.warn("no C compiler for Linux here: this wheel has no compiled C kernels")
            return
        try:
            if native_library.is_clang(compiler):
                raise OSError("its OpenMP runtime is not on every machine; set CC=gcc")
            native_library.compile_levels(compiler, packaged)
        except (OSError, subprocess.CalledProcessError) as error:
            shutil.rmtree(packaged, ignore_errors=True)
            reason = getattr(error, "stderr", None) or error
            self.warn(f"{compiler} fails, so this wheel has no compiled C kernels: {reason}")


class PlatformWheel(bdist_wheel):
    """Names the platform of a wheel with libraries, which need no particular Python."""

    def run(self) -> None:
        """Builds the wheel, for this platform if there are libraries."""
        self.run_command("build")
        if self.libraries():
            self.root_is_pure = False
            self.distribution.has_ext_modules = lambda: True  # setuptools installs into platlib
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        """Returns the tags of Python, ABI and platform."""
        if self.root_is_pure:
            return super().get_tag()
        return self.python_tag, "none", platform_tag([x.read_bytes() for x in self.libraries()])

    def libraries(self) -> list[Path]:
        """Returns the libraries that the build made."""
        built = Path(self.get_finalized_command("build_py").build_lib)
        return sorted(built.glob("recserve/kernels/native/compiled/*.so"))


def platform_tag(libraries: list[bytes]) -> str:
    """Returns the manylinux tag of the newest glibc that the libraries need, as in PEP 600.

    They link nothing but the C library: OpenMP and the maths library are those that torch loads.

    Args:
        libraries: Contents of the libraries.
    """
    machine = platform.machine()
    names = [name for library in libraries for name in re.findall(rb"GLIBC_(\d+)\.(\d+)", library)]
    if not names:  # another C library, whose versions its wheels do not name
        return f"linux_{machine}"
    major, minor = max(OLDEST_GLIBC, *((int(major), int(minor)) for major, minor in names))
    return f"manylinux_{major}_{minor}_{machine}"


setup(cmdclass={"build_py": BuildWithLibraries, "bdist_wheel": PlatformWheel})
