"""What a device gives back: a summary, per-tile times where it has them, and the provenance.

The same keys mean the same on every device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import math
import os
import platform
import threading
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xstage_lab import __version__
from xstage_lab.errors import FileRejected
from xstage_lab.schedule import COPY, NOTHING, Program

SCHEMA = 1
BADGES = ("LIVE", "SIMULATED", "RECORDED", "PREDICTED", "ASSUMED")
SUMMARY_KEYS = ("total_s", "accepted_s", "period_s", "issue_s", "stall_ratio")

TILE = np.dtype([
    ("gpu", np.int16),
    ("sm", np.int32),
    ("row", np.int32),            # row of the GPU's task array
    ("mma_start_s", np.float64),
    ("mma_end_s", np.float64),
    ("issue_start_s", np.float64),  # first store-warp start
    ("issue_end_s", np.float64),    # last store accepted: the slot is free
    ("arrived_s", np.float64),      # last byte at its destination; NaN where nobody can see it
    ("slot_wait_s", np.float64),    # the MMA role waited this long for a slot before the tile
    ("store_bytes", np.int64),
])

Tiles = NDArray[np.void]


@dataclass(frozen=True, kw_only=True)
class Record:
    """One measurement.

    Attributes
    ----------
    summary : dict of str to float
        Design keys: `total_s`, `accepted_s`, `period_s`, `issue_s`, `stall_ratio` and more;
        NaN where the device could not observe it.
    tiles : structured array of dtype `TILE`, or None
        Per-tile times, seconds since the first start anywhere.
    backlog : float array of shape (2, n), or None
        Time (s) and bytes accepted but not yet on the link of GPU 0.
    parameters : dict
        The program, plain values (`Program.parameters`).
    provenance : dict
        `badge`, `device`, `source`, `machine`, versions, date, seed.
    """

    summary: dict[str, float]
    parameters: dict[str, Any]
    provenance: dict[str, Any]
    tiles: Tiles | None = None
    backlog: NDArray[np.float64] | None = field(default=None)

    def save(self, path: str | Path) -> Path:
        """Write the record to `path` (`.npz`), atomically; return the path."""
        write_atomic(path, self.to_bytes())
        return Path(path)

    def to_bytes(self) -> bytes:
        """Return the content of a record file: a compressed `.npz` with a head and a digest."""
        arrays = {name: array for name, array in
                  (("tiles", self.tiles), ("backlog", self.backlog)) if array is not None}
        head = {"schema": SCHEMA, "summary": to_plain(self.summary),
                "parameters": self.parameters, "provenance": self.provenance}
        text = json.dumps(head, sort_keys=True)
        digest = _digest(text, arrays)
        words = {"head": np.array(text.encode()), "digest": np.array(digest.encode())}
        buffer = io.BytesIO()
        # As `np.savez_compressed` does, in a third of its time: words are too short to compress,
        # and the mantissas of measured times hardly get any smaller than at level 1.
        with zipfile.ZipFile(buffer, "w", compresslevel=1) as archive:
            for name, array in (words | arrays).items():
                member = io.BytesIO()
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)
                archive.writestr(f"{name}.npy", member.getbuffer(),
                                 zipfile.ZIP_STORED if name in words else zipfile.ZIP_DEFLATED)
        return buffer.getvalue()

    @classmethod
    def load(cls, path: str | Path) -> Record:
        """Read a record file; see `from_bytes`.

        Raises
        ------
        FileRejected
            Naming the file and the reason.
        """
        try:
            content = Path(path).read_bytes()
        except FileNotFoundError:
            raise FileRejected(path, "no such file.") from None
        except OSError as error:
            raise FileRejected(path, f"cannot be read ({error.strerror}).") from None
        return cls.from_bytes(content, path)

    @classmethod
    def from_bytes(cls, content: bytes, source: object) -> Record:
        """Return the record, checking that it is whole, unedited and of a schema known here.

        Parameters
        ----------
        content : bytes
            What `to_bytes` returned.
        source : object
            Where it comes from, for messages.

        Raises
        ------
        FileRejected
            Naming the source and the reason.
        """
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as stored:
                members = {name: stored[name] for name in stored.files}
                text, digest = (members[name].item().decode() if name in members else ""
                                for name in ("head", "digest"))
                head = json.loads(text or "{}")
        except Exception as error:  # damage may trip any of the parsers
            raise FileRejected(source, f"not a whole record file ({error}); it may have been cut "
                               "short. Measure again or restore it from a copy.") from None
        if not text or not digest or not isinstance(head, dict):
            raise FileRejected(source, "this is not a record of xstage-lab (no head).")
        if head.get("schema") != SCHEMA:
            raise FileRejected(source, f"record schema {head.get('schema')!r}; this version reads "
                               f"{SCHEMA}. Update xstage-lab to open it.")
        arrays = {name: members[name] for name in ("tiles", "backlog") if name in members}
        if _digest(text, arrays) != digest:
            raise FileRejected(source, "the content does not match its digest: the file was edited "
                               "or damaged. Restore it from a copy.")
        summary = {k: math.nan if v is None else float(v) for k, v in head["summary"].items()}
        return cls(summary=summary, parameters=head["parameters"],
                   provenance=head["provenance"], **arrays)


def _digest(text: str, arrays: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()


def write_atomic(path: str | Path, content: bytes) -> None:
    """Write `content` to `path` so that a reader sees the old file or the new one, never half.

    Raises
    ------
    FileRejected
        If the folder cannot be written.
    """
    target = Path(path)
    scratch = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with scratch.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        scratch.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise FileRejected(target, f"cannot be written ({error.strerror}); nothing was changed. "
                           "Choose another folder or free the disk.") from None


def to_plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` fit for JSON: NumPy scalars become plain, NaN and infinity become null."""
    def plain(value: Any) -> Any:
        if value is None or type(value) in (str, int, bool):  # most values, thousands a second
            return value
        if isinstance(value, Mapping):
            return to_plain(value)
        if isinstance(value, np.ndarray):
            return [plain(v) for v in value.tolist()]
        if isinstance(value, list | tuple):
            return [plain(v) for v in value]
        if isinstance(value, set | frozenset):
            return sorted(value)
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, float) and not math.isfinite(value):
            return None
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return to_plain(dataclasses.asdict(value))
        return value
    return {str(key): plain(value) for key, value in values.items()}


def replayed_badge(badge: object) -> str:
    """Return what a stored record is today: what was simulated stays so, all else is RECORDED."""
    return "SIMULATED" if badge == "SIMULATED" else "RECORDED"


def provenance(badge: str, device: str, source: str, **more: Any) -> dict[str, Any]:
    """Return where a number comes from: badge, device, source, versions, date and `more`."""
    return {
        "badge": badge,
        "device": device,
        "source": source,
        "xstage_lab": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **more,
    }


def summarize(tiles: Tiles, program: Program) -> dict[str, float]:
    """Condense per-tile times into the summary every device gives.

    Parameters
    ----------
    tiles : structured array of dtype `TILE`
        In any order; times in seconds since the first start anywhere.
    program : Program

    Returns
    -------
    dict
        `accepted_s` first start anywhere to the last acceptance; `total_s` to the last byte at
        its destination (NaN where arrival cannot be seen); `period_s` mean start-to-start of
        storing tiles per SM over the second half of the run, NaN below 8 of them per SM;
        `issue_s` mean issue span of storing tasks; `stall_ratio` share of SM time spent waiting
        for a slot, for burst trains NaN until the free issue time is known
        (`analysis.compare`); `t_mma_s` mean MMA time; `mma_busy_ratio`, `issue_busy_ratio`
        shares of SM time; `remote_bytes` per GPU, mean. Tasks that only send what others computed
        count as issue and nothing else.
    """
    remote = sum(map(program.remote_bytes, range(program.n_gpus))) / program.n_gpus
    found = summarize_tiles(tiles, program.n_ctas * program.n_gpus, remote,
                            _computes(tiles, program))
    return found | ({"stall_ratio": math.nan} if program.tuning is None else {})


def _computes(tiles: Tiles, program: Program) -> NDArray[np.bool_]:
    """Which tasks are tiles or bursts; the others send what a tile left, or do nothing."""
    computes = np.ones(tiles.size, bool)
    for gpu, tasks in enumerate(program.tasks):
        others = np.isin(tasks["kind"], (COPY, NOTHING))
        if others.any():
            own = tiles["gpu"] == gpu
            computes[own] = ~others[tiles["row"][own]]
    return computes


def summarize_tiles(tiles: Tiles, n_sms: int, remote_bytes: float,
                    computes: NDArray[np.bool_] | bool = True) -> dict[str, float]:
    """Condense tiles whose program nobody knows; see `summarize`.

    Parameters
    ----------
    n_sms : int
        SMs of all GPUs together.
    remote_bytes : float
        Bytes stored to other GPUs, per GPU.
    computes : bool array of shape (n,), optional
        Which of them compute; all if left out.
    """
    computed = tiles[np.broadcast_to(computes, tiles.size)]
    storing = tiles[tiles["store_bytes"] > 0]
    accepted = float(tiles["issue_end_s"].max())
    sm_time = accepted * n_sms
    mma = computed["mma_end_s"] - computed["mma_start_s"]
    span = storing["issue_end_s"] - storing["issue_start_s"]
    return {
        "accepted_s": accepted,
        "total_s": max(float(tiles["arrived_s"].max()), accepted),
        "period_s": _mean_period(computed[computed["store_bytes"] > 0]),
        "issue_s": float(span.mean()) if span.size else math.nan,
        "stall_ratio": float(computed["slot_wait_s"].sum()) / sm_time,
        "t_mma_s": float(mma.mean()),
        "mma_busy_ratio": float(mma.sum()) / sm_time,
        "issue_busy_ratio": float(span.sum()) / sm_time,
        "remote_bytes": remote_bytes,
    }


def lanes(tiles: Tiles) -> list[NDArray[np.int64]]:
    """Return for each SM of each GPU the indices of its tiles, in the order of their MMAs."""
    order = np.lexsort((tiles["row"], tiles["mma_start_s"], tiles["sm"], tiles["gpu"]))
    new = (np.diff(tiles["sm"][order]) != 0) | (np.diff(tiles["gpu"][order]) != 0)
    return np.split(order, np.flatnonzero(new) + 1)


def slot_wait_start(tiles: Tiles) -> NDArray[np.float64]:
    """Return when each tile's wait for a slot began (s); NaN where the wait is not known.

    A kernel that takes a slot before it starts a tile waits before the MMA. One that takes it at
    the end, for sums held in registers, waits after the MMA; that is so where the waits of the
    record do not fit in before.
    """
    free = np.zeros(tiles.size)  # the end of the SM's MMA before
    for own in lanes(tiles):
        free[own[1:]] = tiles["mma_end_s"][own[:-1]]
    before = tiles["mma_start_s"] - tiles["slot_wait_s"]
    if np.any(before < free - 1e-9):
        return np.asarray(tiles["mma_end_s"] + 0.0 * tiles["slot_wait_s"])
    return np.asarray(before)


def _mean_period(storing: Tiles, fewest: int = 8) -> float:
    """Mean start-to-start per SM over the second half of its storing tiles."""
    sm = storing["gpu"].astype(np.int64) * (int(storing["sm"].max(initial=0)) + 1) + storing["sm"]
    order = np.lexsort((storing["issue_start_s"], sm))
    _, first, count = np.unique(sm[order], return_index=True, return_counts=True)
    if not count.size or count.min() < fewest:
        return math.nan
    middle, last = first + count // 2, first + count - 1
    start = storing["issue_start_s"][order]
    return float(((start[last] - start[middle]) / (last - middle)).mean())
