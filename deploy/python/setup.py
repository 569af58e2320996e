"""Adds what is made at build time to the wheel: the gRPC client, the program and its libraries.

build_wheel.sh sets the environment: MOESERVE_VERSION, the version; MOESERVE_PLATFORM, the platform tag
of the wheel, such as manylinux_2_36_x86_64.
"""

import importlib.metadata
import os
import pathlib
import shutil

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution
from wheel.bdist_wheel import bdist_wheel

HERE = pathlib.Path(__file__).resolve().parent


class BuildWithProgram(build_py):
    """Generates the modules of the gRPC interface, and copies the folders bin and lib."""

    def run(self):
        super().run()
        from grpc_tools import protoc

        root = pathlib.Path(self.build_lib)
        status = protoc.main(["protoc", f"-I{HERE / 'proto'}", f"--python_out={root}",
                              f"--pyi_out={root}", f"--grpc_python_out={root}",
                              "moeserve/v1/moeserve.proto"])
        if status != 0:
            raise SystemExit("the gRPC interface cannot be generated")
        (root / "moeserve/v1/__init__.py").touch()
        for folder in ("bin", "lib"):
            shutil.copytree(HERE / folder, root / "moeserve" / folder, dirs_exist_ok=True)


class ProgramWheel(bdist_wheel):
    """A wheel for every Python 3, but for one platform."""

    def finalize_options(self):
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self):
        return "py3", "none", os.environ["MOESERVE_PLATFORM"]


class PlatformDistribution(Distribution):
    def has_ext_modules(self):
        return True


def at_least(package):
    """Generated code needs the version with which it was generated, or a later one."""
    return f"{package}>={importlib.metadata.version(package)}"


setup(version=os.environ["MOESERVE_VERSION"],
      install_requires=[at_least("grpcio"), at_least("protobuf"), "numpy>=1.22"],
      cmdclass={"build_py": BuildWithProgram, "bdist_wheel": ProgramWheel},
      distclass=PlatformDistribution)
