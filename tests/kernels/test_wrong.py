"""Every deliberately wrong kernel is caught by the check that must catch it, the real one by none.

All run the two-layer program, which has what they get wrong: ragged edges, slots in use again,
owners on both GPUs, tiles that wait for others.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import two_layers

from xstage_lab.errors import XStageError
from xstage_lab.kernels.failures import KernelFailed
from xstage_lab.kernels.host import check_races
from xstage_lab.kernels.wrong import EMULATOR, RACE, RESULT, WATCHDOG, WRONG
from xstage_lab.reference import WrongResult

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

BUDGET_CYCLES = 300_000  # of an emulated wait; the real kernel needs a tenth
ERROR = {RESULT: WrongResult, WATCHDOG: KernelFailed, EMULATOR: KernelFailed}

IN_ANOTHER_PROCESS = """
import os, sys
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # its threads would be watched too
sys.path.insert(0, {folder!r})
import two_layers
from xstage_lab.kernels.wrong import WRONG
variant = two_layers.variant(**{fields!r})
source = variant.source
for name in {names!r}:
    source = WRONG[name].edit(source)
two_layers.run(variant, source, n_gpus=1, n_ctas={n_ctas}, budget_cycles=2**40)
"""


def races(names: list[str], n_ctas: int, **fields: object) -> list[str]:
    """ThreadSanitizer's reports on the two-layer program with the mistakes of these names."""
    folder = str(Path(two_layers.__file__).parent)
    return check_races(IN_ANOTHER_PROCESS.format(folder=folder, names=names, n_ctas=n_ctas,
                                                 fields=fields))


def named(*checks: str) -> list[str]:
    """The mistakes that one of the checks must catch."""
    return [name for name, wrong in WRONG.items() if wrong.caught_by in checks]


def test_each_check_has_its_mistakes() -> None:
    """Every kind of check is proved by some mistake, and together they are more than six."""
    assert {wrong.caught_by for wrong in WRONG.values()} == {RESULT, WATCHDOG, RACE, EMULATOR}
    assert len(WRONG) >= 6


@pytest.mark.parametrize("name", named(RESULT, WATCHDOG, EMULATOR))
def test_mistake_is_caught(name: str) -> None:
    """A wrong kernel ends with the named check's error, which says where and what."""
    wrong = WRONG[name]
    variant = two_layers.variant(store_path=wrong.store_path, signal=wrong.signal)
    with pytest.raises(XStageError, match=wrong.finding) as caught:
        two_layers.run(variant, wrong.edit(variant.source), budget_cycles=BUDGET_CYCLES)
    assert type(caught.value) is ERROR[wrong.caught_by]


@pytest.mark.usefixtures("race_checker")
@pytest.mark.parametrize("name", named(RACE))
def test_race_is_caught(name: str) -> None:
    """ThreadSanitizer reports the race that a mistake opens, where it lies."""
    wrong = WRONG[name]
    n_ctas = 2 if "counter" in name else 1  # tasks that wait for another CTA's
    reports = races([name], n_ctas, store_path=wrong.store_path, signal=wrong.signal)
    assert any(re.search(wrong.finding, report) for report in reports), reports


@pytest.mark.usefixtures("race_checker")
@pytest.mark.parametrize(
    ("store_path", "signal", "issue_depth"),
    [("registers", "release", 2), ("bulk", "fence", 3), ("registers", "none", 1)],
)
def test_real_kernel_has_no_races(store_path: str, signal: str, issue_depth: int) -> None:
    """ThreadSanitizer finds nothing in the kernel as it is."""
    assert races([], 2, store_path=store_path, signal=signal, issue_depth=issue_depth) == []


@pytest.mark.parametrize("store_path", ["registers", "bulk"])
@pytest.mark.parametrize("signal", ["none", "release"])
def test_real_kernel_passes(store_path: str, signal: str) -> None:
    """What catches the mistakes lets the kernel pass as it is, in every variant they use."""
    variant = two_layers.variant(store_path=store_path, signal=signal)
    two_layers.run(variant, variant.source, budget_cycles=BUDGET_CYCLES)
