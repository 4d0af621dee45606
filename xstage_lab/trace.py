"""A record's per-tile times as a trace that ui.perfetto.dev and chrome://tracing open.

A process per GPU, and in it three rows for each SM: what its MMA role computes, how long that
role waits for a slot, and what its store role issues. Stores of several tiles travel at a time,
so that they stand as async events, from accepted to arrived. The format counts in microseconds
and its viewers in whole nanoseconds, to which all times are rounded.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xstage_lab.errors import NotMeasured
from xstage_lab.record import Record, Tiles, lanes, slot_wait_start, to_plain, write_atomic

Event = dict[str, Any]

_GPU_ID = 1          # viewers take process 0 for the idle one
_ROW_ID = 1_000_000  # above all processes: a thread of its process's number is the main one


def write(record: Record, path: str | Path) -> Path:
    """Write a record's trace, atomically; `path` ending in ``.gz`` compresses it.

    Raises
    ------
    NotMeasured
        If the record holds no per-tile times.
    FileRejected
        If the folder cannot be written.
    """
    content = to_bytes(record)
    if str(path).endswith(".gz"):
        content = gzip.compress(content, compresslevel=5, mtime=0)
    write_atomic(path, content)
    return Path(path)


def to_bytes(record: Record) -> bytes:
    """Return the content of a trace file in JSON; see `write`."""
    about = to_plain({"provenance": record.provenance, "parameters": record.parameters,
                      "summary": record.summary})
    lines = ",\n".join(map(json.dumps, events(record)))
    return (f'{{"displayTimeUnit": "ns",\n"otherData": {json.dumps(about)},\n'
            f'"traceEvents": [\n{lines}\n]}}\n').encode()


def events(record: Record) -> list[Event]:
    """Return the trace events of a record, plain values.

    Where a device simulated one GPU for all, which do the same, that one stands alone.

    Raises
    ------
    NotMeasured
        If the record holds no per-tile times.
    """
    if record.tiles is None or not record.tiles.size:
        raise NotMeasured("the record holds no per-tile times, and a trace shows nothing else; "
                          "measure on a device that sees tiles.")
    tiles, alike = record.tiles, ""
    n_simulated = record.provenance.get("n_gpus_simulated")
    if n_simulated is not None and tiles["gpu"].max() >= n_simulated:
        alike = f", one of {int(tiles['gpu'].max()) + 1} alike"
        tiles = tiles[tiles["gpu"] < n_simulated]
    is_burst = "burst_bytes" in record.parameters
    return [*_names(record, tiles, is_burst, alike), *_about(record), *_rows(tiles, is_burst),
            *_in_flight(tiles), *_backlog(record)]


def _labels(is_burst: bool) -> tuple[str, ...]:
    """Return the rows of an SM; a burst's producer waits for nothing but its own issue."""
    return ("gap", "issue") if is_burst else ("MMA", "issue", "stall")


def _names(record: Record, tiles: Tiles, is_burst: bool, alike: str) -> Iterator[Event]:
    """Name and order the processes and their rows; the badge stands in every process name."""
    badge = f"{record.provenance.get('badge')}: {record.provenance.get('source')}"
    digits = len(str(tiles["sm"].max()))
    for gpu in np.unique(tiles["gpu"]).tolist():
        pid = _GPU_ID + gpu
        yield _named("process_name", pid, 0, name=f"GPU {gpu}{alike}, {badge}")
        yield _named("process_sort_index", pid, 0, sort_index=gpu)
        for sm in np.unique(tiles["sm"][tiles["gpu"] == gpu]).tolist():
            for i, label in enumerate(_labels(is_burst)):
                tid = _row_id(sm, i)
                yield _named("thread_name", pid, tid, name=f"SM {sm:0{digits}d} {label}")
                yield _named("thread_sort_index", pid, tid, sort_index=tid)


def _named(what: str, pid: int, tid: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid or pid, "args": args}


def _row_id(sm: int, row: int) -> int:
    return _ROW_ID + 4 * sm + row


def _about(record: Record) -> Iterator[Event]:
    """Say at the start what this is: Perfetto shows no metadata but the arguments of events."""
    args = to_plain({**record.provenance, **record.parameters})
    yield {"ph": "i", "s": "p", "name": "about this record", "pid": _GPU_ID, "tid": _GPU_ID,
           "ts": 0.0, "args": {key: value for key, value in args.items() if value is not None}}


def _rows(tiles: Tiles, is_burst: bool) -> Iterator[Event]:
    """What MMA role and store role do, and the waits between; events of a row never overlap."""
    waited = slot_wait_start(tiles)
    spans = [(tiles["mma_start_s"], tiles["mma_end_s"], ""),
             (tiles["issue_start_s"], tiles["issue_end_s"], ", {size}"),
             (waited, waited + tiles["slot_wait_s"], " waits for a slot")]
    sizes = {n: _size(n) for n in np.unique(tiles["store_bytes"]).tolist()}
    whose = list(zip(*(tiles[name].tolist() for name in ("gpu", "sm", "row", "store_bytes")),
                     strict=True))
    what = "burst" if is_burst else "tile"
    labels = _labels(is_burst)
    for i, (label, (start_s, end_s, more)) in enumerate(zip(labels, spans, strict=False)):
        end = _ns(end_s)
        start = _apart(tiles, _ns(start_s), end)
        for (gpu, sm, row, n_bytes), t0, t1 in zip(whose, start.tolist(), end.tolist(),
                                                   strict=True):
            if t1 > t0:
                yield {"ph": "X", "cat": label, "pid": _GPU_ID + gpu, "tid": _row_id(sm, i),
                       "name": f"{what} {row}" + more.format(size=sizes[n_bytes]),
                       "ts": t0 / 1e3, "dur": (t1 - t0) / 1e3,
                       "args": {what: row, "store_bytes": n_bytes}}


def _in_flight(tiles: Tiles) -> Iterator[Event]:
    """What is accepted and has not arrived, where arrival was seen."""
    accepted, arrived = _ns(tiles["issue_end_s"]), _ns(tiles["arrived_s"])
    some = arrived > accepted
    digits = len(str(tiles["sm"].max()))
    columns = (*(tiles[name][some] for name in ("gpu", "sm", "row")), accepted[some], arrived[some])
    for i, (gpu, sm, row, t0, t1) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        event = {"cat": "in flight", "id2": {"local": f"0x{i:x}"}, "pid": _GPU_ID + gpu,
                 "tid": _GPU_ID + gpu, "name": f"SM {sm:0{digits}d} in flight"}
        yield {"ph": "b", **event, "ts": t0 / 1e3, "args": {"tile": row}}
        yield {"ph": "e", **event, "ts": t1 / 1e3}


def _backlog(record: Record) -> Iterator[Event]:
    """The samples of the backlog, which are GPU 0's."""
    if record.backlog is None:
        return
    for t, held in zip(_ns(record.backlog[0]).tolist(), record.backlog[1].tolist(), strict=True):
        yield {"ph": "C", "name": "backlog of the link", "pid": _GPU_ID, "tid": _GPU_ID,
               "ts": t / 1e3, "args": {"bytes": held}}


def _ns(times_s: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return times in whole nanoseconds; a span that is not known becomes empty."""
    return np.rint(np.nan_to_num(times_s) * 1e9).astype(np.int64)


def _apart(
    tiles: Tiles, start: NDArray[np.int64], end: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return starts of which none is before the spans before it on its SM have ended.

    With several store warps the first may take up a tile before the last has done with the one
    before; the row then shows the rest. Viewers would nest what overlaps, and show it wrong.
    """
    start = start.copy()
    for own in lanes(tiles):
        latest = np.maximum.accumulate(end[own])
        start[own[1:]] = np.maximum(start[own[1:]], latest[:-1])
    return start


def _size(n_bytes: int) -> str:
    kib = n_bytes / 1024
    return f"{kib:g} KiB" if n_bytes % 1024 == 0 or kib >= 100 else f"{n_bytes} B"
