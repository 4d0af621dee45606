"""The doctor names what is missing and what to do, and never fails because of it."""

from __future__ import annotations

import importlib
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import emulated_cuda
import pytest

from xstage_lab import doctor
from xstage_lab.browser import BROWSER_VARIABLE, browser_flags, find_browser


def install(folder: Path, name: str, version: str, *needs: str) -> None:
    """Put the metadata of an installed distribution into `folder`."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    header = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    (info / "METADATA").write_text("\n".join([*header, *(f"Requires-Dist: {n}" for n in needs)]))


def executable(path: Path) -> str:
    """Make an empty executable file."""
    path.write_text("")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def found_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where Python looks before everywhere else, for packages and for versions."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in [m for m in sys.modules if m.split(".")[0] == "cupy"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def problems() -> list[str]:
    """What is wrong and its remedy, as one text each."""
    return [f"{p['what']} {p['remedy']}" for p in doctor.report()["problems"]]


def test_this_environment_fits() -> None:
    """The packages this test runs with are all there and go together."""
    assert [p for p in problems() if "does not go" in p or "not installed" in p] == []


def test_report_is_plain() -> None:
    """The report survives JSON unchanged and every version in it is shown as text."""
    report = doctor.report()
    assert json.loads(json.dumps(report)) == report
    text = "\n".join(doctor.lines())
    assert all(f"{name} {version}" in text for name, version in report["packages"].items())


@pytest.mark.parametrize(("version", "fits"), [("2.4.3", False), ("3.9.2", True), ("4.0.0", False)])
def test_bokeh_pair(found_first: Path, version: str, fits: bool) -> None:
    """A Bokeh that jupyter_bokeh cannot show is told with both versions and the pip command."""
    install(found_first, "bokeh", version)
    install(found_first, "jupyter_bokeh", "4.1.0", "bokeh==3.*", "ipywidgets==8.*")
    told = [p for p in problems() if "jupyter_bokeh 4.1.0" in p]
    assert (told == []) == fits
    assert all(f"bokeh {version}" in p and 'pip install --upgrade "bokeh==3.*"' in p for p in told)


def test_package_too_old_for_the_lab(found_first: Path) -> None:
    """A package below the lab's own range is told with the range."""
    install(found_first, "ipywidgets", "7.7.0")
    assert any(
        "ipywidgets 7.7.0" in p and "xstage-lab" in p and "<9,>=8.1" in p for p in problems()
    )


def link_package(folder: Path, name: str) -> None:
    """Make an installed package, but not its metadata, importable from `folder`."""
    installed = Path(importlib.import_module(name).__file__ or "").parent
    for source in installed.parent.glob(f"{name}*"):
        if not source.name.endswith(".dist-info"):
            (folder / source.name).symlink_to(source)


def report_of_bare_python(folder: Path) -> dict[str, Any]:
    """What the doctor says in a Python that has only NumPy, the checkout and `folder`."""
    link_package(folder, "numpy")
    path = [str(folder), str(Path(doctor.__file__).parents[1])]
    code = f"import sys; sys.path += {path}; from xstage_lab import doctor; import json;"
    command = [sys.executable, "-I", "-S", "-c", f"{code} print(json.dumps(doctor.report()))"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_bare_python(tmp_path: Path) -> None:
    """Where nothing is installed but what the lab imports the doctor still reports."""
    report = report_of_bare_python(tmp_path)
    assert set(report["packages"].values()) == {None}
    assert report["python"] == platform.python_version()


def test_package_missing(tmp_path: Path) -> None:
    """A package that the lab declares and that is not there is told with the pip command."""
    install(tmp_path, "xstage_lab", "9", "bokeh>=3", "numpy", "simpy; extra == 'dev'")
    install(tmp_path, "packaging", "26")
    install(tmp_path, "numpy", "2.4.6")
    link_package(tmp_path, "packaging")
    told = [p for p in report_of_bare_python(tmp_path)["problems"] if "not installed" in p["what"]]
    assert told == [{"what": "bokeh is not installed.", "remedy": 'Run: pip install "bokeh>=3"'}]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise ImportError('no libcudart')", "no libcudart"),
        ("raise OSError('bad library')", "bad library"),
        ("class cuda:\n class runtime:\n  def getDeviceCount(): raise RuntimeError('old')", "old"),
    ],
)
def test_no_gpu_says_why(found_first: Path, body: str, reason: str) -> None:
    """Without a usable GPU the reason is told, and that the rest works."""
    (found_first / "cupy.py").write_text(body)
    assert doctor.report()["n_gpus"] == 0
    assert any(reason in p and "Everything but the cuda device works" in p for p in problems())


def test_gpus_paths_and_limits_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every GPU is told with its limits, every pair with its path, and what can be measured."""
    emulated = emulated_cuda.install(monkeypatch, 3)
    emulated.apart = {(0, 2)}
    report = doctor.report()
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert report["n_gpus"] == 3
    assert [gpu["name"] for gpu in report["gpus"]] == ["Emulated"] * 3
    text = "\n".join(doctor.lines())
    for number in range(3):
        assert (f"GPU {number}: Emulated, compute capability 9.0, 4 SMs up to 1000 MHz" in text)
    assert "227 KiB of shared memory for a CTA, 228 KiB an SM, cooperative launches" in text
    assert "GPU 0 and GPU 1: NVLink" in text
    assert "GPU 0 and GPU 2: GPU 0 and GPU 2 have no path" in text
    assert "cuda driver 13.0, cuda runtime 13.0, cupy emulated" in text
    assert {name for name, why in report["measures"].items() if not why} >= {
        "cuda:local", "cuda:host", "cuda:peer"}
    assert "cuda:peer (live, between GPUs)" in text
    assert not any("cuda" in p for p in problems())


@pytest.mark.parametrize(("attributes", "n_gpus", "cannot", "told"), [
    ({}, 1, {"cuda:peer"}, "there is one GPU only"),
    ({19: 0}, 1, {"cuda:host", "cuda:peer"}, "does not map host memory"),
    ({75: 7, 76: 5}, 2, {"cuda:local", "cuda:host", "cuda:peer"}, "compute capability 7.5"),
])
def test_what_gpus_cannot_measure_says_why(
    monkeypatch: pytest.MonkeyPatch, attributes: dict[int, int], n_gpus: int, cannot: set[str],
    told: str
) -> None:
    """What cannot be measured on the GPUs that are there is named, each with its reason."""
    emulated_cuda.install(monkeypatch, n_gpus).attributes.update(attributes)
    measures = doctor.report()["measures"]
    assert {name for name, why in measures.items() if why} == cannot
    assert any(told in measures[name] for name in cannot)


def test_without_a_gpu_the_rest_is_named(found_first: Path) -> None:
    """Without a GPU the text says what works all the same, and that cuda does not."""
    (found_first / "cupy.py").write_text("raise ImportError('not here')")
    text = "\n".join(doctor.lines())
    assert "can be measured here: simulated (times of a model)" in text
    assert "cannot: cuda: there is no GPU to use." in text
    assert doctor.report()["gpus"] == []


def test_a_missing_compiler_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without g++ the host device is named as what does not work, with how to get it."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "apt-get install g++" in doctor.report()["measures"]["host"]
    assert any("checked on the CPU" in p and "apt-get install g++" in p for p in problems())


def test_no_browser_says_what_still_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a browser the doctor names the exports that work, and how to get the others."""
    monkeypatch.setenv(BROWSER_VARIABLE, str(tmp_path / "none"))
    assert doctor.report()["browser"] is None
    assert any("HTML" in p and "SVG" in p and BROWSER_VARIABLE in p for p in problems())


def test_browser_is_looked_up_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable goes before the search path, and Chromium before Chrome."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(BROWSER_VARIABLE, raising=False)
    chrome = executable(tmp_path / "google-chrome")
    assert find_browser() == chrome
    chromium = executable(tmp_path / "chromium")
    assert find_browser() == chromium
    mine = executable(tmp_path / "mine")
    monkeypatch.setenv(BROWSER_VARIABLE, mine)
    assert find_browser() == mine


@pytest.mark.parametrize(("user", "sandboxed"), [(0, False), (1000, True)])
def test_only_root_goes_without_sandbox(
    monkeypatch: pytest.MonkeyPatch, user: int, sandboxed: bool
) -> None:
    """The browser's sandbox is given up only where Chromium would not start with it."""
    monkeypatch.setattr("os.geteuid", lambda: user)
    assert ("--no-sandbox" not in browser_flags()) == sandboxed
