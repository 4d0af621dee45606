"""Where the files of `data/` lie, in a checkout and in an installed package."""

from __future__ import annotations

from pathlib import Path

from xstage_lab.errors import UnknownName

_PACKAGE = Path(__file__).resolve().parent


def data_folder() -> Path:
    """Return the folder that holds the lab's data files.

    A wheel carries `data/` inside the package; in a checkout it lies beside it.

    Returns
    -------
    pathlib.Path
        An absolute path.
    """
    installed = _PACKAGE / "data"
    return installed if installed.is_dir() else _PACKAGE.parent / "data"


def data_path(name: str) -> Path:
    """Return the path of one data file.

    Parameters
    ----------
    name : str
        Path below `data/` with forward slashes, for instance ``"machines.csv"``.

    Returns
    -------
    pathlib.Path
        An absolute path of a file that exists.

    Raises
    ------
    UnknownName
        If there is no such file; names the nearest ones.
    """
    folder = data_folder()
    known = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    if name not in known:
        raise UnknownName("data file", name, known)
    return folder / name
