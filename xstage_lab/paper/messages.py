"""Published times of one warp's messages to a peer: issue is not completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xstage_lab import law
from xstage_lab.devices.recorded import published_issue_times
from xstage_lab.paper.table import Compared, Table, error_ratio, spread
from xstage_lab.record import Record
from xstage_lab.units import text

Floats = NDArray[np.float64]

L1_BYTES = 32 * 1024  # larger messages read their source past the L1 cache, which then binds


class Messages(NamedTuple):
    """One machine's times per message, smallest payload first, arrays of one shape.

    Attributes
    ----------
    machine, source : str
    payload_bytes : 0 is an empty loop
    stores_s, release_s, fence_s : stores alone; and a release flag; and a system fence and a flag
    """

    machine: str
    source: str
    payload_bytes: Floats
    stores_s: Floats
    release_s: Floats
    fence_s: Floats

    def ends(self) -> tuple[int, int]:
        """Index of the smallest and of the largest payload that is stored out of L1."""
        stored = np.flatnonzero((self.payload_bytes > 0) & (self.payload_bytes <= L1_BYTES))
        return int(stored[0]), int(stored[-1])

    @property
    def per_sm_bytes_per_s(self) -> float:
        """r_SM of one warp, from these two payloads alone."""
        first, last = self.ends()
        return float((self.payload_bytes[last] - self.payload_bytes[first])
                     / (self.stores_s[last] - self.stores_s[first]))

    @property
    def issue_latency_s(self) -> float:
        """t0, where the line through these two payloads meets a payload of nothing."""
        first, _ = self.ends()
        return float(self.stores_s[first] - self.payload_bytes[first] / self.per_sm_bytes_per_s)

    def issue_s(self, payload_bytes: Floats) -> Floats:
        """Issue time by the law, t0 + B / r_SM (s)."""
        return law.issue_free_time(payload_bytes, self.per_sm_bytes_per_s, self.issue_latency_s)


def messages(records: Sequence[Record] | None = None) -> list[Messages]:
    """Return the published messages, or those of `records`, by machine."""
    everything = published_issue_times() if records is None else records
    found = []
    for machine in dict.fromkeys(str(record.provenance["machine"]) for record in everything):
        rows = sorted((r for r in everything if r.provenance["machine"] == machine),
                      key=lambda r: float(r.parameters["burst_bytes"]))
        times = (np.array([r.summary[key] for r in rows])
                 for key in ("issue_s", "release_flag_s", "fence_flag_s"))
        found.append(Messages(machine, str(rows[0].provenance["source"]),
                              np.array([float(r.parameters["burst_bytes"]) for r in rows]),
                              *times))
    return found


def issue_completion_table() -> Table:
    """Read t0 and r_SM from two payloads, and a flag's cost from one; test them on the others."""
    everything = messages()
    rows = [row for machine in everything for row in _rows(machine)]
    summary: dict[str, float] = {}
    for machine in everything:
        tested = [row for row in rows if row["tested"] and row["machine"] == machine.machine]
        largest = [row for row in rows if row["machine"] == machine.machine
                   and row["payload_bytes"] == L1_BYTES]
        summary |= {f"{machine.machine}_issue_latency_s": machine.issue_latency_s,
                    f"{machine.machine}_per_sm_bytes_per_s": machine.per_sm_bytes_per_s}
        summary |= spread(f"{machine.machine}_law_error_ratio",
                          (row["law_error_ratio"] for row in tested))
        summary[f"{machine.machine}_fence_over_stores"] = (
            largest[0]["fence_s"] / largest[0]["stores_s"])
    stored = [row for row in rows if row["law_release_error_ratio"] is not None]
    summary |= spread("law_release_error_ratio",
                      (row["law_release_error_ratio"] for row in stored))
    return Table(
        name="issue-completion", compared=(
            Compared("stores_s", ("law_s",)), Compared("release_s", ("law_release_s",))),
        title="One warp's messages to a peer: issued, flagged, fenced",
        source="; ".join(dict.fromkeys(machine.source for machine in everything)), rows=rows,
        fitted_on={"t0 and r_SM of each machine": "its smallest and its 32 KiB payload",
                   "a release flag's cost": "the smallest payload of each machine"},
        summary=summary, notes=_notes(everything, summary))


def _rows(machine: Messages) -> list[dict[str, Any]]:
    first, last = machine.ends()
    flag_s = float(machine.release_s[first] - machine.stores_s[first])
    rows = []
    for i, payload in enumerate(machine.payload_bytes.tolist()):
        stores, release, fence = (float(of[i]) for of in (
            machine.stores_s, machine.release_s, machine.fence_s))
        by_law = float(machine.issue_s(machine.payload_bytes)[i])
        within = 0 < payload <= L1_BYTES
        flagged = stores + flag_s
        rows.append({
            "machine": machine.machine, "payload_bytes": int(payload), "stores_s": stores,
            "release_s": release, "fence_s": fence, "past_l1": payload > L1_BYTES,
            "fitted_to": i in (first, last), "tested": within and i not in (first, last),
            "law_s": by_law, "law_error_ratio": error_ratio(by_law, stores),
            "release_less_stores_s": release - stores, "law_release_s": flagged,
            "law_release_error_ratio": (
                error_ratio(flagged, release) if within and i != first else None),
            "fence_less_stores_s": fence - stores,
            "completion_coupled_error_ratio": error_ratio(fence, stores)})
    return rows


def _notes(everything: list[Messages], summary: dict[str, float]) -> tuple[str, ...]:
    told = "; ".join(
        f"{m.machine}: t0 = {text('_s', m.issue_latency_s)}, r_SM = "
        f"{text('_bytes_per_s', m.per_sm_bytes_per_s)}, "
        f"off by up to {summary[f'worst_{m.machine}_law_error_ratio']:.1%} between"
        for m in everything)
    return (
        f"Issue, t0 + B/r_SM of one warp: {told}. On RTX-PRO-5000 the first 2 KiB cost more per "
        "byte than the rest; no straight line through any two payloads is right there, and the "
        "law has no such bend.",
        "A payload of 0 stores nothing and times the loop; it is neither fitted to nor tested. "
        "Rows of 128 KiB read their source past the L1 cache; Q is not to be read from them.",
        "A release flag adds the same time at every payload, as it should if it is posted behind "
        "the stores; a system fence adds time that grows with the payload, because it waits "
        "for their completion. Issue and completion are two things: what completion-coupled "
        "reading makes of the issue, the fenced time, is "
        + " and ".join(f"{summary[f'{m.machine}_fence_over_stores']:.1f} times too long on "
                       f"{m.machine}" for m in everything) + " at 32 KiB.",
        "At 128 KiB the fence adds less than at 32 KiB: stores come so slowly that the path keeps "
        "up. r_SM here is one warp's; that of a full SM, in `store-sweeps`, is higher.")
