"""How a kernel fails, in words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from xstage_lab.errors import XStageError

N_REPORT_WORDS = 8  # WaitLimit.report in ptx.cuh
_REASONS = {1: "its cycle budget was spent", 2: "the abort flag was raised"}


class KernelFailed(XStageError):
    """A kernel did what it must not do, or waited for what never came."""


def describe_report(report: NDArray[np.uint32], waits: Sequence[str]) -> str:
    """Return who waited for what in vain, or an empty string if every wait was answered.

    Parameters
    ----------
    report : uint32 array of shape (8,)
        As the kernel left it, `WaitLimit` in `ptx.cuh`.
    waits : sequence of str
        What each of the kernel's waits is for; its header comment numbers them from 0.
    """
    reason, what, cta, thread, step, seen, wanted = (int(word) for word in report[:7])
    if reason == 0:
        return ""
    name = waits[what] if what < len(waits) else f"wait {what}"
    why = _REASONS.get(reason, f"reason {reason}")
    return (f"CTA {cta}, thread {thread}, step {step} waited for {name}: it saw {seen} and needs "
            f"{wanted}; {why}.")
