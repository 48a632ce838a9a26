"""Renders the runbooks into the package when it is built; pyproject.toml has everything else."""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))
from deploy.runbook_pages import write_pages


class BuildWithRunbooks(build_py):
    """Builds the package with the pages that a controller serves under `/runbooks/`."""

    def run(self) -> None:
        """Write the pages, then build as usual; an editable install serves them from here."""
        write_pages()
        super().run()


setup(cmdclass={"build_py": BuildWithRunbooks})
