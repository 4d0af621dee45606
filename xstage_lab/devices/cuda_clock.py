"""The clocks of SMs -> seconds: their rate, and how far apart they are.

Each SM counts its own cycles. Every CTA reads its count beside the GPU's global timer, at a step
of the timer, when it starts and when it has ended. The rate is that of the SMs over the global
timer; the counts at the start align the SMs with each other. Differences within an SM are exact to
a cycle, times on different SMs to what the alignment allows: tens of nanoseconds, where the timer's
steps are seen by all SMs at the same time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xstage_lab.errors import XStageError


class Anchors(NamedTuple):
    """Where CTAs read both clocks.

    Attributes
    ----------
    start_ns, start_cycles, end_ns, end_cycles : int64 arrays of shape (n_ctas,)
    """

    start_ns: NDArray[np.int64]
    start_cycles: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    end_cycles: NDArray[np.int64]

    @property
    def over_s(self) -> float:
        """The mean time between start and end."""
        return float((self.end_ns - self.start_ns).mean()) * 1e-9

    @property
    def clock_hz(self) -> float:
        """Cycles per second, those of all CTAs together."""
        elapsed = int((self.end_ns - self.start_ns).sum())
        if elapsed <= 0:
            raise XStageError("the GPU's global timer did not move during the run: times cannot be "
                              "told. Measure again; a profiler or a virtual GPU may hold it.")
        return float((self.end_cycles - self.start_cycles).sum()) / elapsed * 1e9


def seconds(cycles: NDArray[np.int64], anchors: Anchors, clock_hz: float) -> NDArray[np.float64]:
    """Return when the CTAs' clocks showed `cycles`.

    Parameters
    ----------
    cycles : int64 array of shape (n_ctas, ...)
    anchors : Anchors
    clock_hz : float
        Rate of the SMs' clocks.

    Returns
    -------
    float64 array of the shape of `cycles`
        Seconds since the first anchor.
    """
    per_cta = (-1,) + (1,) * (cycles.ndim - 1)
    since = (anchors.start_ns - anchors.start_ns.min()) * 1e-9
    passed = (cycles - anchors.start_cycles.reshape(per_cta)) / clock_hz
    return np.asarray(since.reshape(per_cta) + passed)
