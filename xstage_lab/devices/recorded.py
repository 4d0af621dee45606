"""The recorded device: replays saved records and published tables; runs nothing new.

What it gives back says that it is RECORDED, by whom, and what it was when it was measured.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from xstage_lab import catalog
from xstage_lab.devices.base import Capabilities
from xstage_lab.errors import FileRejected, InvalidValue, NotMeasured, UnknownName
from xstage_lab.record import SUMMARY_KEYS, Record, replayed_badge, to_plain
from xstage_lab.schedule import Program
from xstage_lab.spec import FusedGemm, MachineSpec


class RecordedDevice:
    """A device that only remembers.

    Parameters
    ----------
    source : str, Path or sequence of Record
        A record file, a folder of record files (`*.npz`), or records at hand, such as those of
        `published_gemm_rs`.
    machine : MachineSpec, optional
        Replay the records of this machine. May be left out where all records are of one machine
        that the catalog knows.

    Raises
    ------
    FileRejected
        If a file is damaged, or there is none; names it.
    NotMeasured
        If nothing was recorded on `machine`.
    """

    name = "recorded"
    badge = "RECORDED"

    def __init__(
        self, source: str | Path | Sequence[Record], machine: MachineSpec | None = None
    ) -> None:
        stored = _load(Path(source)) if isinstance(source, str | Path) else list(source)
        self.machine = machine or _machine_of(stored)
        self._records = [
            _replayed(record)
            for record in stored
            if record.provenance.get("machine") == self.machine.name
        ]
        if not self._records:
            raise NotMeasured(
                f"nothing is recorded of {self.machine.name}, only of {_names(stored)}."
            )
        self.capabilities = Capabilities(
            times=True,
            per_tile=all(record.tiles is not None for record in self._records),
            any_program=False,
        )

    def records(self) -> list[Record]:
        """Return all runs that can be replayed."""
        return list(self._records)

    def measure(self, program: Program, seed: int | None = None) -> Record:
        """Return the record of `program`.

        A published table does not say everything; it answers for every program that agrees with
        what it says.

        Parameters
        ----------
        program : Program
        seed : int, optional
            Chooses among runs of the same program; the first is taken if none had that seed.

        Raises
        ------
        NotMeasured
            If nobody recorded it, naming the nearest run.
        """
        asked = to_plain(program.parameters())
        found = [record for record in self._records if not _differences(record, asked)]
        if not found:
            raise NotMeasured(self._nearest(asked))
        same = [record for record in found if record.provenance.get("seed") == seed]
        return (same or found)[0]

    def holds(self, program: Program) -> bool:
        """Whether `program` was recorded."""
        asked = to_plain(program.parameters())
        return any(not _differences(record, asked) for record in self._records)

    def _nearest(self, asked: Mapping[str, Any]) -> str:
        near = min(self._records, key=lambda record: _distance(record, asked))
        told = ", ".join(
            f"{name} = {near.parameters[name]} (asked for: {asked.get(name, 'not part of it')})"
            for name in _differences(near, asked)
        )
        return (
            f"nobody recorded this program on {self.machine.name}; the nearest of "
            f"{len(self._records)} runs has {told}. Choose that one, or measure on another device."
        )


def published_sweeps() -> list[Record]:
    """Return the published rates against the number of SMs that issue.

    Returns
    -------
    list of Record
        `parameters`: `n_producers` SMs, `path` (``"register store"``, ...) and `direction`
        (``"write"`` or ``"read"``); `summary`: `rate_bytes_per_s`, all else NaN.
    """
    return _published(
        "sm_sweeps",
        lambda row: {
            "workload": "BurstTrain",
            "n_producers": row["sms"],
            "path": row["path"],
            "direction": row["direction"],
        },
        {"rate_bytes_per_s": "bytes_per_s"},
    )


def published_gemm_rs() -> list[Record]:
    """Return the published times of GEMM fused with reduce-scatter on 8 H100, against K.

    Returns
    -------
    list of Record
        `summary`: `total_s` of the fused kernel, `unfused_gemm_s` of the GEMM alone, all else
        NaN. Tile, staging and rotation of the rows were not published and are no parameters.

    References
    ----------
    ParallelKittens, arXiv 2511.13940.
    """
    published = ("workload", "m", "n", "k", "n_gpus", "destinations", "dtype", "out_dtype")

    def parameters(row: Mapping[str, Any]) -> dict[str, Any]:
        gemm = FusedGemm(
            m=row["m"], n=row["n"], k=row["k_per_gpu"], n_gpus=8, destinations="row-owner"
        )
        known = {"workload": "FusedGemm", **dataclasses.asdict(gemm)}
        return {name: known[name] for name in published}

    return _published(
        "pk_gemm_rs",
        parameters,
        {"total_s": "gemm_rs_fused_s", "unfused_gemm_s": "gemm_s"},
        machine="H100-SXM",
    )


def published_wave_lag() -> list[Record]:
    """Return the published times of one fused MoE kernel on 8 H100, in two orders of its tiles.

    Returns
    -------
    list of Record
        `summary`: `total_s` of the kernel with dispatch, activation and all else it does, the
        rest NaN. Tile, staging, routing, size of waves and lag were not published and are no
        parameters.

    References
    ----------
    sgl-project/DeepGEMM PR 88.
    """
    def parameters(order: str) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
        return lambda row: {
            "workload": "MoELayer", "tokens": row["tokens_per_rank"], "hidden": row["hidden"],
            "intermediate": row["moe_intermediate"], "experts": row["experts"],
            "top_k": row["top_k"], "n_gpus": 8, "order": order, "dtype": "fp8",
        }  # fmt: skip

    orders = {"wave": "wave_s", "interleaved": "lag_s"}
    return [
        record
        for order, column in orders.items()
        for record in _published(
            "h100_wave_lag", parameters(order), {"total_s": column}, machine="H100-SXM"
        )
    ]


def published_issue_times() -> list[Record]:
    """Return the published times of one warp's back-to-back messages to a peer.

    Returns
    -------
    list of Record
        `parameters`: `burst_bytes` of a message; `summary`: `issue_s` of its stores,
        `release_flag_s` of stores and a release flag, `fence_flag_s` of stores, a system fence
        and a flag, all else NaN. At 128 KiB the source is read past the L1 cache, which then is
        what binds.
    """
    return _published(
        "issue_vs_completion",
        lambda row: {
            "workload": "BurstTrain",
            "n_producers": 1,
            "threads_per_producer": 32,
            "burst_bytes": row["payload_bytes"],
        },
        {
            "issue_s": "stores_s",
            "release_flag_s": "stores_release_flag_s",
            "fence_flag_s": "stores_fence_flag_s",
        },
    )


def _published(
    table: str,
    parameters: Callable[[Mapping[str, Any]], dict[str, Any]],
    columns: Mapping[str, str],
    machine: str = "",
) -> list[Record]:
    """Return a record per row; `columns` says which column fills which key of the summary."""
    rows = catalog.table(table)
    records = []
    for values in rows.tolist():
        row = dict(zip(rows.dtype.names or (), values, strict=True))
        records.append(
            Record(
                summary={
                    **dict.fromkeys(SUMMARY_KEYS, math.nan),
                    **{key: row[column] for key, column in columns.items()},
                },
                parameters=parameters(row),
                provenance={
                    "badge": RecordedDevice.badge,
                    "device": RecordedDevice.name,
                    "machine": machine or row["machine"],
                    "source": row["source"],
                    "table": f"data/{table}.csv",
                },
            )
        )
    return records


def _load(path: Path) -> list[Record]:
    if not path.is_dir():
        return [Record.load(path)]
    files = sorted(path.glob("*.npz"))
    if not files:
        raise FileRejected(path, "this folder holds no record files (*.npz).")
    return [Record.load(file) for file in files]


def _machine_of(stored: Sequence[Record]) -> MachineSpec:
    """Return the one machine that all records are of."""
    names = {str(record.provenance.get("machine")) for record in stored}
    if len(names) != 1:
        raise InvalidValue(
            "machine", None, f"one of those recorded: {_names(stored)}",
            remedy="Say whose records to replay.",
        )  # fmt: skip
    try:
        return catalog.machine(names.pop())
    except UnknownName as error:
        raise InvalidValue(
            "machine", None, "the machine the records are of",
            remedy=f"The records name none that the catalog knows ({error})",
        ) from None  # fmt: skip


def _names(stored: Sequence[Record]) -> str:
    return ", ".join(sorted({str(r.provenance.get("machine")) for r in stored})) or "nothing"


def _replayed(record: Record) -> Record:
    """Return `record` as a replay: what was live is RECORDED, what was simulated stays so."""
    stored = record.provenance
    if stored.get("badge") == RecordedDevice.badge:
        return record
    marked = {
        **stored,
        "badge": replayed_badge(stored.get("badge")),
        "device": RecordedDevice.name,
        "recorded_badge": stored.get("badge"),
        "recorded_device": stored.get("device"),
    }
    return dataclasses.replace(record, provenance=marked)


def _differences(record: Record, asked: Mapping[str, Any]) -> list[str]:
    """Return the parameters of `record` that the asked program has not, or has otherwise."""
    return [
        name
        for name, value in record.parameters.items()
        if name not in asked or asked[name] != value
    ]


def _distance(record: Record, asked: Mapping[str, Any]) -> tuple[bool, int, float]:
    """Return how far a record is from the asked program: workload, differences, their size."""
    differing = _differences(record, asked)
    far = 0.0
    for name in differing:
        have, want = record.parameters[name], asked.get(name)
        if isinstance(have, int | float) and isinstance(want, int | float):
            far += abs(math.log1p(abs(have)) - math.log1p(abs(want)))
        else:
            far += 1.0
    return "workload" in differing, len(differing), far
