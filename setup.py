"""Compiles the CPU's kernels into the package; everything else is in pyproject.toml."""

import importlib.util
import os
import warnings
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDER = Path(__file__).parent / "jax_q4k" / "native"

# By its path: importing the package would need all that it depends on.
spec = importlib.util.spec_from_file_location("native_build", FOLDER / "build.py")
native_build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native_build)
LIBRARY = FOLDER / native_build.LIBRARY


class BuildLibrary(build_ext):
    """A plain shared library, and an installation without it where it cannot be compiled."""

    def get_ext_filename(self, fullname):
        return str(Path(*fullname.split(".")[:-1]) / native_build.LIBRARY)

    def build_extension(self, ext):
        if os.environ.get("JAX_Q4K_BUILD") == "0":
            return  # `python -m jax_q4k.native` builds the library later, and shows progress
        current = "CXX" not in os.environ and native_build.is_current(LIBRARY)
        if current and self.editable_mode:
            return  # an earlier installation's, minutes of compiling
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        if current:
            self.copy_file(str(LIBRARY), str(target))
            return
        try:
            left_out = native_build.compile_library(target)
            if left_out:
                warnings.warn(
                    f"the compiler knows no kernels for {', '.join(left_out)}", stacklevel=1
                )
        except native_build.BuildError as error:
            warnings.warn(f"jax-q4k is installed without its CPU kernels: {error}", stacklevel=1)

    def copy_extensions_to_source(self):
        """For an editable installation; a library that was not built is not copied."""
        built = Path(self.build_lib) / "jax_q4k" / "native" / native_build.LIBRARY
        if built.exists():
            self.copy_file(str(built), str(LIBRARY))


class PlainWheel(bdist_wheel):
    """A wheel for this machine and every Python; the library does not use the ABI of Python."""

    def get_tag(self):
        _, _, platform = super().get_tag()
        return "py3", "none", platform


sources = sorted(
    str(path.relative_to(Path(__file__).parent)) for path in (FOLDER / "src").iterdir()
)
library = Extension(
    "jax_q4k.native.libjax_q4k", [s for s in sources if s.endswith(".cpp")], depends=sources
)
setup(ext_modules=[library], cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlainWheel})
