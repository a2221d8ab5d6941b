"""What pyproject.toml can't say: the Flower App of this repository travels in the wheel, as flower_dp/_app."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithApp(build_py):
    """Copy the app to where `flower-dp run` looks for it when there is no checkout."""

    def run(self) -> None:
        """Build the package, and the app inside it unless the install is editable: that one has the checkout."""
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib, "flower_dp", "_app")
        shutil.rmtree(target, ignore_errors=True)
        for file in _app_files():
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target / file)

    def get_source_files(self) -> list[str]:
        """Return what a source distribution must hold: the app as well."""
        return [*super().get_source_files(), *_app_files()]


def _app_files() -> list[str]:
    """Return the app's files, relative to the repository: what `fab-include` names, without the library."""
    files = [path for pattern in ("*.py", "*.toml") for path in sorted(Path("apps").rglob(pattern))]
    return [*map(str, files), "pyproject.toml", "README.md"]


setup(cmdclass={"build_py": BuildWithApp})
