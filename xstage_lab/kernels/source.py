"""A kernel as one self-contained text: a `.cu` file with the headers it includes in place.

The same text goes to NVRTC for a GPU and to g++ for the host device, and its digest names what
was compiled, in caches and in the provenance of records.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from xstage_lab.errors import UnknownName, XStageError

_FOLDER = Path(__file__).resolve().parent
_INCLUDE = re.compile(r'^#include "([\w./]+)"$', re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A kernel's text and parameters.

    Attributes
    ----------
    name : str
        Of the file without its suffix, and of the `extern "C"` kernel in it.
    text : str
        CUDA C++ that includes nothing of this package. `#line` directives name the original
        files, so that compilers do.
    defines : mapping of str to int
        Parameters, given to the compiler as `-D`.
    """

    name: str
    text: str
    defines: Mapping[str, int]

    @property
    def options(self) -> list[str]:
        """The parameters as compiler options, in a fixed order."""
        return [f"-D{key}={value}" for key, value in sorted(self.defines.items())]

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of text and parameters."""
        return hashlib.sha256("\n".join([self.name, *self.options, self.text]).encode()).hexdigest()

    def replace(self, old: str, new: str) -> Source:
        """Return a copy with the one place that reads `old` changed to `new`.

        Raises
        ------
        XStageError
            If `old` occurs nowhere or more than once.
        """
        n_places = self.text.count(old)
        if n_places != 1:
            raise XStageError(f"{self.name}: {old!r} occurs {n_places} times; a substitution "
                              "needs exactly one place. Quote more of the line, or less.")
        return dataclasses.replace(self, text=self.text.replace(old, new))


def read(name: str, **defines: int) -> Source:
    """Read a kernel of this package.

    Parameters
    ----------
    name : str
        For instance `fused_tiles`.
    **defines : int
        The kernel's parameters; its header comment lists them.

    Raises
    ------
    UnknownName
        If there is no such kernel; names those there are.
    """
    kernels = [path.stem for path in _FOLDER.glob("*.cu")]
    if name not in kernels:
        raise UnknownName("kernel", name, kernels)
    return Source(name=name, text=_with_includes(f"{name}.cu", set()), defines=defines)


def cache_folder() -> Path:
    """Return the folder in which compiled kernels are kept for the next run."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "xstage-lab" / "kernels"


def _with_includes(file: str, seen: set[str]) -> str:
    """Return a file's text with each header it includes put in place the first time."""
    seen.add(file)
    text = (_FOLDER / file).read_text(encoding="utf-8").replace("#pragma once\n", "\n")
    parts, end = [f'#line 1 "{file}"\n'], 0
    for found in _INCLUDE.finditer(text):
        header = found.group(1)
        line = text.count("\n", 0, found.end()) + 2
        parts.append(text[end:found.start()])
        if header not in seen:
            parts.append(_with_includes(header, seen))
        parts.append(f'#line {line} "{file}"')
        end = found.end()
    return "".join([*parts, text[end:]])
