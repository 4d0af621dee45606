"""An installed wheel has everything a checkout has."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from xstage_lab.datafiles import data_folder, data_path
from xstage_lab.errors import UnknownName

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "xstage_lab", "data")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which a wheel of this checkout was unpacked, as pip does."""
    source, wheels, site = (tmp_path_factory.mktemp(n) for n in ("source", "wheels", "site"))
    for name in SOURCES:
        path = ROOT / name
        if path.is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(path, source / name, ignore=ignore)
        else:
            shutil.copy(path, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(wheels), str(source)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    return site


def files_below(folder: Path) -> set[str]:
    """Relative names of the files that belong to the project."""
    found = (p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return {p.relative_to(folder).as_posix() for p in found}


def test_wheel_holds_every_file(installed: Path) -> None:
    """No module, source or data file of the checkout is missing from the wheel."""
    expected = files_below(ROOT / "xstage_lab") | {f"data/{n}" for n in files_below(ROOT / "data")}
    missing = expected - files_below(installed / "xstage_lab")
    assert not missing, f"add to [tool.setuptools] in pyproject.toml what holds {sorted(missing)}"


def test_installed_package_reads_its_own_data(installed: Path) -> None:
    """Away from the checkout the package finds its data inside itself."""
    code = "from xstage_lab.datafiles import data_folder; print(data_folder())"
    paths = [str(installed), *(p for p in sys.path if p.endswith("site-packages"))]
    code = f"import sys; sys.path[:0] = {paths}; {code}"
    command = [sys.executable, "-I", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=installed)
    assert Path(done.stdout.strip()) == installed / "xstage_lab" / "data"


def test_checkout_reads_the_top_level_data() -> None:
    """In a checkout the data files are those at the top of the repository."""
    assert data_folder() == ROOT / "data"
    names = files_below(ROOT / "data")
    assert names
    assert all(data_path(name).is_file() for name in names)


@pytest.mark.parametrize("name", ["machine.csv", "../pyproject.toml", "", "/etc/passwd"])
def test_unknown_data_file(name: str) -> None:
    """A name that is no data file is refused with the names that are."""
    with pytest.raises(UnknownName, match=r"machines\.csv"):
        data_path(name)
