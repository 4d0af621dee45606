"""The shape of the package: who imports whom, what is loaded when, sizes, names and units."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "xstage_lab"


class Part(NamedTuple):
    """A module or folder of the package and the packages it may import."""

    name: str
    at_import: frozenset[str] = frozenset()
    inside_functions: frozenset[str] = frozenset()


def part(name: str, at_import: str = "", inside_functions: str = "") -> Part:
    return Part(name, frozenset(at_import.split()), frozenset(inside_functions.split()))


# From the bottom up: a part imports only the parts before it.
PARTS = (
    part("errors"),
    part("units"),
    part("datafiles"),
    part("browser"),
    part("spec", "numpy"),
    part("tables", "numpy"),
    part("machinefile", "numpy"),
    part("catalog", "numpy"),
    part("schedule", "numpy"),
    part("record", "numpy"),
    part("trace", "numpy"),
    part("timings", "numpy"),
    part("database"),
    part("runlog"),
    part("law", "numpy"),
    part("kernels", "numpy", "cuda cupy_backends"),
    part("reference", "numpy", "torch"),
    part("devices", "numpy numba", "cupy"),
    part("doctor_gpus", "", "cuda"),
    part("doctor", "", "packaging"),
    part("worker"),
    part("parallel"),
    part("experiment", "numpy"),
    part("analysis", "numpy scipy"),
    part("paper", "numpy scipy"),
    part("recording_plan", "numpy"),
    part("recording_checks"),
    part("recording"),
    part("recording_cuda"),
    part("device_choice"),
    part("plots", "numpy bokeh"),
    part("export", "numpy bokeh"),
    part("lab", "numpy bokeh ipywidgets jupyter_bokeh IPython"),
    part("command_workloads"),
    part("command"),
    part("command_timings"),
    part("command_tune"),
    part("__init__"),
    part("__main__", "", "numpy"),
)
RANK = {p.name: rank for rank, p in enumerate(PARTS)}

# A simulator that calls the law proves nothing by agreeing with it.
MEASURING, PREDICTING = {"devices", "worker", "parallel", "experiment"}, {"law", "analysis"}
HEAVY = ("bokeh", "cupy", "ipywidgets", "jupyter_bokeh", "numba", "scipy", "torch")

MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60

UNIT = re.compile(r"(^|_)(s|hz|bytes|bytes_per_s|flop|flop_per_s|ratio)$|^n_")
# A factor of a display; pairs whose halves have units of their own; what has the unit that the
# form names.
UNITLESS = {"Display.scale", "Record.backlog", "State.backlog", "Sweep.points", "Form.bounds",
            "Fitted.parameter"}
FLOAT = re.compile(r"\bfloat(16|32|64|ing)?\b|\bFloat\w*\b", re.IGNORECASE)

TOP_LEVEL = {
    "README.md", "environment.yml", "notebooks", "xstage_lab", "tests", "data",
    "pyproject.toml", "Makefile", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "bench",
}  # fmt: skip


class Import(NamedTuple):
    """One imported module by its absolute name, and whether importing the file loads it."""

    module: str
    at_import: bool
    line: int


def imports_of(source: str, package: str) -> Iterator[Import]:
    """Every import in a file that belongs to `package`, wherever it stands."""
    yield from _imports_below(ast.parse(source), package, at_import=True)


def _imports_below(node: ast.AST, package: str, at_import: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        loads = at_import and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            loads = False
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, loads, child.lineno)
        elif isinstance(child, ast.ImportFrom):
            yield from _from_import(child, package, loads)
        else:
            yield from _imports_below(child, package, loads)


def _from_import(node: ast.ImportFrom, package: str, loads: bool) -> Iterator[Import]:
    """`from . import a` and `from xstage_lab import a` name the module `xstage_lab.a`."""
    base = node.module or ""
    if node.level:
        above = package.split(".")[: len(package.split(".")) - node.level + 1]
        base = ".".join([*above, *([base] if base else [])])
    if base != "xstage_lab":
        yield Import(base, loads, node.lineno)
        return
    for alias in node.names:
        if alias.name != "__version__":  # a plain string that every part may know
            known = alias.name in RANK or (PACKAGE / alias.name).exists()
            yield Import(f"xstage_lab.{alias.name if known else '__init__'}", loads, node.lineno)


def part_of(module: str) -> str:
    """The part that a dotted name inside the package belongs to."""
    return module.split(".")[1] if "." in module else "__init__"


def import_faults(source: str, module: str, package: str) -> list[str]:
    """What is wrong with the imports of a file, one line each."""
    name = part_of(module)
    if name not in RANK:
        return [f"{module}: give the part {name!r} its place in PARTS"]
    allowed, faults = PARTS[RANK[name]], []
    for found in imports_of(source, package):
        where, top = f"{module}:{found.line}", found.module.split(".")[0]
        if top == "xstage_lab":
            target = part_of(found.module)
            if target != name and RANK.get(target, len(PARTS)) >= RANK[name]:
                faults.append(f"{where} imports {target}, which is not below {name}")
            if name in MEASURING and target in PREDICTING:
                faults.append(f"{where}: {name} measures and must not know {target}")
        elif top not in sys.stdlib_module_names | allowed.at_import | allowed.inside_functions:
            faults.append(f"{where} imports {top}, which {name} may not need")
        elif found.at_import and top in allowed.inside_functions - allowed.at_import:
            faults.append(f"{where} imports {top} at import time, not where it is used")
    return faults


def size_faults(source: str, module: str) -> list[str]:
    """Modules and functions over the ceilings, one line each."""
    n_lines = len(source.splitlines())
    faults = [f"{module}: {n_lines} lines"] if n_lines > MAX_MODULE_LINES else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                faults.append(f"{module}:{node.lineno} {node.name}: {length} lines")
    return faults


def float_fields(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Public float fields of a public dataclass, named tuple or structured dtype."""
    if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
        kind = " ".join(ast.unparse(e) for e in [*node.decorator_list, *node.bases])
        annotated = [f for f in node.body if isinstance(f, ast.AnnAssign)]
        for field in annotated if "dataclass" in kind or "NamedTuple" in kind else []:
            name, holds = ast.unparse(field.target), ast.unparse(field.annotation)
            # The keys of a mapping carry the units themselves.
            if FLOAT.search(holds) and not re.search(r"(dict|Mapping)\[", holds):
                yield f"{node.name}.{name}", field.lineno
    elif isinstance(node, ast.Tuple) and len(node.elts) >= 2:
        name, holds = node.elts[0], ast.unparse(node.elts[1])
        if isinstance(name, ast.Constant) and re.fullmatch(r"np\.float\d+|'f\d'", holds):
            yield str(name.value), node.lineno


def unit_faults(source: str, module: str) -> list[str]:
    """Float fields that say no unit in their name, one line each."""
    found = [f for node in ast.walk(ast.parse(source)) for f in float_fields(node)]
    return [
        f"{module}:{line} {name} has no unit suffix"
        for name, line in found
        if name not in UNITLESS
        and not name.split(".")[-1].startswith("_")
        and not UNIT.search(name.split(".")[-1])
    ]


def docstring_faults(source: str, module: str) -> list[str]:
    """Test functions whose docstring is not one paragraph that ends like a sentence."""
    faults = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            text = (ast.get_docstring(node) or "").strip()
            if "\n\n" in text or not text.endswith("."):
                faults.append(f"{module}:{node.lineno} {node.name}")
    return faults


def modules() -> list[tuple[str, str, str]]:
    """Source, dotted name and package of every file of the package."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        package = ".".join(parts[:-1])
        dotted = package if parts[-1] == "__init__" else ".".join(parts)
        found.append((path.read_text(encoding="utf-8"), dotted, package))
    return found


def test_imports_go_one_way() -> None:
    """Each part imports only parts below it and only the packages it may need."""
    assert [
        f for source, name, package in modules() for f in import_faults(source, name, package)
    ] == []


def test_measuring_reaches_no_law() -> None:
    """No chain of imports leads from a device or an experiment to the law or the analysis."""
    reached, waiting = set(), set(MEASURING)
    direct: dict[str, set[str]] = {}
    for source, name, package in modules():
        targets = {
            part_of(i.module) for i in imports_of(source, package) if "xstage_lab" in i.module
        }
        direct.setdefault(part_of(name), set()).update(targets)
    while waiting:
        reached.add(current := waiting.pop())
        waiting |= direct.get(current, set()) - reached
    assert reached & PREDICTING == set()


def test_import_is_light() -> None:
    """Importing the package loads NumPy at most."""
    code = f"import sys, xstage_lab; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_sizes() -> None:
    """No module and no function is too long to read in one go."""
    assert [f for source, name, _ in modules() for f in size_faults(source, name)] == []


def test_units_in_names() -> None:
    """A float in a public record says its unit in its name."""
    assert [f for source, name, _ in modules() for f in unit_faults(source, name)] == []


def test_test_docstrings() -> None:
    """Every test says in one sentence what holds."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    assert [f for p in files for f in docstring_faults(p.read_text(), p.name)] == []


def test_top_level() -> None:
    """The repository holds nothing at its top that a newcomer would not look for."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT), "ls-files"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    tops = {line.split("/")[0] for line in listed}
    assert {t for t in tops if not t.startswith(".")} - TOP_LEVEL == set()


PLANTED_IMPORTS = [
    ("law", "from xstage_lab.analysis import tune"),
    ("law", "from xstage_lab import plots"),
    ("law", "from . import plots"),
    ("law", "import xstage_lab"),
    ("law", "from xstage_lab import run"),
    ("law", "def f():\n    import scipy.optimize"),
    ("law", "import numba"),
    ("devices.simulated", "from xstage_lab.law import period"),
    ("devices.simulated", "def f():\n    from ..law import period"),
    ("devices.cuda", "import cupy as cp"),
    ("devices.cuda", "try:\n    import cupy\nexcept ImportError:\n    cupy = None"),
    ("devices.cuda", "class A:\n    import cupy"),
    ("experiment", "import numba"),
    ("reference", "import torch"),
    ("nowhere", "import math"),
]


@pytest.mark.parametrize(("name", "source"), PLANTED_IMPORTS)
def test_planted_import_is_found(name: str, source: str) -> None:
    """An import against the table is reported, however it is written."""
    module = f"xstage_lab.{name}"
    assert len(import_faults(source, module, module.rpartition(".")[0])) >= 1


ALLOWED_IMPORTS = [
    ("analysis", "import scipy.optimize\nfrom xstage_lab.law import period"),
    ("devices.simulated", "import numba\nfrom .base import Device\nfrom ..spec import LinkSpec"),
    ("devices.cuda", "def f():\n    import cupy"),
    ("devices.cuda", "if TYPE_CHECKING:\n    import cupy"),
    ("record", "import json\nfrom xstage_lab import __version__"),
]


@pytest.mark.parametrize(("name", "source"), ALLOWED_IMPORTS)
def test_allowed_import_passes(name: str, source: str) -> None:
    """Imports that follow the table are not reported."""
    module = f"xstage_lab.{name}"
    assert import_faults(source, module, module.rpartition(".")[0]) == []


def test_planted_sizes_are_found() -> None:
    """A module and a function over the ceiling are reported, and those at it are not."""
    body = "def f():\n" + "    pass\n" * (MAX_FUNCTION_LINES - 1)
    padding = "\n" * (MAX_MODULE_LINES - len(body.splitlines()))
    assert size_faults(body + padding, "m") == []
    assert len(size_faults(body + "    pass\n" + padding, "m")) == 2


def test_planted_field_without_unit_is_found() -> None:
    """A float field without a unit is reported, in every form a field can hold floats."""
    fields = ["a: float", "b: float | None = None", "c: NDArray[np.float64]", "d: FloatArray"]
    fine = ["e_s: float", "n_f: float", "g_bytes_per_s: float", "h: int", "_i: float", "j: str"]
    source = "@dataclass(frozen=True)\nclass A:\n    " + "\n    ".join(fields + fine)
    assert len(unit_faults(source, "m")) == len(fields)
    assert len(unit_faults("class B(NamedTuple):\n    period: float", "m")) == 1
    assert len(unit_faults("np.dtype([('gap', np.float64), ('b_s', np.float64)])", "m")) == 1


@pytest.mark.parametrize("docstring", ["", '"""No full stop"""', '"""One.\n\n    Two.\n    """'])
def test_planted_docstring_is_found(docstring: str) -> None:
    """A test that does not say its behaviour in one sentence is reported."""
    source = f"def test_a():\n    {docstring}\n    pass"
    assert len(docstring_faults(source, "m")) == 1
