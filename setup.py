"""What pyproject.toml can't say: it travels in the wheel itself, as flower_dp/_app, with the settings of the Flower App."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithApp(build_py):
    """Copy the app's files to where `flower-dp run` looks for them when there is no checkout."""

    def run(self) -> None:
        """Build the package, and the app inside it unless the install is editable: that one has the checkout."""
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib, "flower_dp", "_app")
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        for file in ("pyproject.toml", "README.md"):
            shutil.copyfile(file, target / file)


setup(cmdclass={"build_py": BuildWithApp})
