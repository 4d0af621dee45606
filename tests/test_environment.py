"""The conda environment and the Python package ask for the same things."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent

# Packages that conda-forge and PyPI call by different names.
CONDA_NAME = {"cupy-cuda13x": "cupy", "torch": "pytorch"}
# What only one of the two needs: conda's Python and its CUDA come as packages, while on PyPI each
# part of CUDA is a package that conda's CuPy brings along.
CONDA_ONLY = {"python", "cuda-version", "pip"}
PYPI_ONLY_PREFIX = "nvidia-cuda-"


def pypi_ranges(pyproject: dict[str, Any]) -> dict[str, SpecifierSet]:
    """What the package and its extras `gpu` and `dask` ask for, by the names conda uses."""
    project = pyproject["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["gpu"], *extras["dask"]]
    parsed = [Requirement(line) for line in lines]
    return {
        canonicalize_name(CONDA_NAME.get(r.name, r.name)): r.specifier
        for r in parsed
        if not r.name.startswith(PYPI_ONLY_PREFIX)
    }


def conda_ranges(environment: dict[str, Any]) -> dict[str, SpecifierSet]:
    """What the conda environment asks for; a range in conda's syntax reads as one in pip's."""
    lines = [line for line in environment["dependencies"] if isinstance(line, str)]
    parsed = [Requirement(line) for line in lines]
    return {canonicalize_name(r.name): r.specifier for r in parsed}


def differences(environment: dict[str, Any], pyproject: dict[str, Any]) -> list[str]:
    """One line for each package that is missing on a side or has another range there."""
    conda, pypi = conda_ranges(environment), pypi_ranges(pyproject)
    for name in CONDA_ONLY:
        conda.pop(name, None)
    return [
        f"{name}: environment.yml {conda.get(name)}, pyproject.toml {pypi.get(name)}"
        for name in sorted(conda.keys() | pypi.keys())
        if conda.get(name) != pypi.get(name)
    ]


@pytest.fixture
def environment() -> dict[str, Any]:
    """The content of environment.yml."""
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "environment.yml").read_text())
    return loaded


@pytest.fixture
def pyproject() -> dict[str, Any]:
    """The content of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_same_packages_and_ranges(environment: dict[str, Any], pyproject: dict[str, Any]) -> None:
    """Conda and pip users get the same packages in the same ranges."""
    assert differences(environment, pyproject) == []


@pytest.mark.parametrize("planted", ["bokeh >=3.9.2,<3.10", "pandas >=2", "bokeh"])
def test_drift_is_found(
    environment: dict[str, Any], pyproject: dict[str, Any], planted: str
) -> None:
    """A range or a package changed on one side only is reported by name."""
    name = planted.split()[0]
    kept = [d for d in environment["dependencies"] if not str(d).startswith("bokeh")]
    environment["dependencies"] = [*kept, planted]
    assert any(line.startswith(f"{name}:") for line in differences(environment, pyproject))


def test_same_python(environment: dict[str, Any], pyproject: dict[str, Any]) -> None:
    """Conda installs no Python that the package refuses, and starts at the same one."""
    conda, pypi = conda_ranges(environment)["python"], pyproject["project"]["requires-python"]
    minors = [f"3.{minor}" for minor in range(30)]
    offered, accepted = list(conda.filter(minors)), list(SpecifierSet(pypi).filter(minors))
    assert offered[0] == accepted[0] == "3.11"
    assert set(offered) <= set(accepted)


def test_conda_installs_the_lab_itself(environment: dict[str, Any]) -> None:
    """The conda environment can import the lab, not only what the lab needs."""
    pip_lines = next(d["pip"] for d in environment["dependencies"] if isinstance(d, dict))
    assert pip_lines == ["-e ."]
