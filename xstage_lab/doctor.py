"""What this computer has and lacks for the lab, and what to do about it."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any, NamedTuple

from xstage_lab import doctor_gpus
from xstage_lab.browser import BROWSER_VARIABLE, find_browser

_PACKAGES = ("numpy", "numba", "scipy", "bokeh", "ipywidgets", "jupyter_bokeh", "jupyterlab")


class Problem(NamedTuple):
    """Something that is missing or does not fit, and its remedy."""

    what: str
    remedy: str


def report() -> dict[str, Any]:
    """Look at this computer; never raises for what is missing.

    Returns
    -------
    dict
        Plain values, ready for JSON: `python` (version), `packages` (name to version, None where
        absent), `browser` (path or None), `n_gpus` (int), `gpus`, `connections`, `tools` and
        `measures` as in `doctor_gpus.Gpus`, and `problems`, a list of dicts with the keys `what`
        and `remedy`.
    """
    return _report(doctor_gpus.look())


def _report(found: doctor_gpus.Gpus) -> dict[str, Any]:
    browser = find_browser()
    problems = package_problems()
    if browser is None:
        problems.append(_NO_BROWSER)
    if found.missing:
        problems.append(Problem(_STILL_WORKS, found.missing))
    if found.measures["host"]:
        problems.append(Problem("Kernels cannot be checked on the CPU.", found.measures["host"]))
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "browser": browser,
        "n_gpus": len(found.gpus),
        "gpus": found.gpus,
        "connections": found.connections,
        "tools": found.tools,
        "measures": found.measures,
        "problems": [problem._asdict() for problem in problems],
    }


def lines() -> list[str]:
    """Return the report as a few lines of text, problems and remedies last.

    Returns
    -------
    list of str
    """
    gpus = doctor_gpus.look()
    found = _report(gpus)
    versions = ", ".join(f"{n} {v or 'missing'}" for n, v in found["packages"].items())
    return [
        f"Python {found['python']}, {versions}",
        f"browser for SVG and PNG export: {found['browser'] or 'none'}",
        *doctor_gpus.lines(gpus),
        *(f"! {p['what']} {p['remedy']}" for p in found["problems"]),
    ]


_NO_BROWSER = Problem(
    "No Chromium or Chrome: figures export as HTML, with CSV and JSON, but not as SVG or PNG.",
    "Install one (Debian, Ubuntu: apt-get install chromium), or set "
    f"{BROWSER_VARIABLE} to its path.",
)
_STILL_WORKS = "Everything but the cuda device works on this computer."


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def package_problems() -> list[Problem]:
    """Return the packages that are missing, or too old or new for the lab or for each other."""
    versions = {name: _version(name) for name in _PACKAGES}
    if _version("packaging") is None:
        return [Problem("Versions were not compared.", "Run: pip install packaging")]
    problems = [
        Problem(f"{name} is not installed.", f'Run: pip install "{wanted}"')
        for name, wanted in _wanted().items()
        if versions.get(name) is None
    ]
    for asker in ("xstage-lab", "jupyter_bokeh"):
        for name, wanted in _wanted(asker).items():
            found = versions.get(name)
            if found is not None and not _fits(found, wanted):
                problems.append(_misfit(asker, name, found, wanted))
    return problems


def _misfit(asker: str, name: str, found: str, wanted: str) -> Problem:
    asked_by = f"{asker} {_version(asker)}"
    effect = " Figures in notebooks may stay blank." if "bokeh" in name else ""
    return Problem(
        f"{name} {found} does not go with {asked_by}, which needs {wanted}.{effect}",
        f'Run: pip install --upgrade "{wanted}", then restart JupyterLab.',
    )


def _wanted(asker: str = "xstage-lab") -> dict[str, str]:
    """What an installed package says it needs of the packages that matter here."""
    try:
        needs = metadata.requires(asker) or []
    except metadata.PackageNotFoundError:
        return {}  # run from a checkout: nothing is declared
    plain = [need.split(";")[0].strip() for need in needs if "extra ==" not in need]
    return {name: need for need in plain for name in _PACKAGES if _name_of(need) == name}


def _name_of(requirement: str) -> str:
    from packaging.requirements import Requirement

    return Requirement(requirement).name.replace("-", "_").lower()


def _fits(version: str, requirement: str) -> bool:
    from packaging.requirements import Requirement

    return Requirement(requirement).specifier.contains(version, prereleases=True)
