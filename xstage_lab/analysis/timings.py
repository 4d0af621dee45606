"""Per-tile times beside the law: what it predicts of the very tiles, and what holds them up."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from xstage_lab import law
from xstage_lab.analysis.calibration import Calibration
from xstage_lab.analysis.comparison import (
    NEGLIGIBLE_BLOCKED_SHARE,
    NEGLIGIBLE_SHARE,
    Comparison,
    compare,
)
from xstage_lab.analysis.prediction import Prediction
from xstage_lab.analysis.tilings import lanes_used
from xstage_lab.errors import NotMeasured
from xstage_lab.record import Record, Tiles, provenance
from xstage_lab.spec import MachineSpec
from xstage_lab.timings import most_held
from xstage_lab.units import text


def predict_timings(record: Record, machine: MachineSpec, calibration: Calibration) -> Prediction:
    """Predict a run from its own tiles: their number, bytes and SMs, and the median MMA time.

    Nothing else is taken from the record; drain rate, capacity and issue rate are the
    calibration's. Where the record does not say its issue depth, it is supposed to be the most
    tiles that an SM holds at a time. Of several GPUs the slowest sets the times.

    Raises
    ------
    NotMeasured
        If the record holds no per-tile times.
    """
    if record.tiles is None or not record.tiles.size:
        raise NotMeasured("the record holds no per-tile times; there is nothing to explain.")
    tiles = record.tiles
    t_mma = float(np.median(tiles["mma_end_s"] - tiles["mma_start_s"]))
    depth = record.parameters.get("issue_depth") or most_held(tiles)
    n_gpus = record.parameters.get("n_gpus")
    lanes = 1.0 if n_gpus is None else lanes_used(machine, n_gpus)
    share = _remote_ratio(record)

    def at(cal: Calibration) -> tuple[dict[str, float], law.Staged, law.TileRun, int]:
        run = _run(tiles, share, t_mma, depth, cal, lanes)
        staged = law.staged_tiles(run)
        slowest = int(np.argmax(staged.accepted_s))
        found = {name: float(getattr(staged, name)[slowest])
                 for name in ("accepted_s", "period_s", "issue_s", "stall_ratio")}
        waves = math.ceil(np.asarray(run.n_tiles)[slowest] / np.asarray(run.n_sms)[slowest])
        return {"total_s": float(staged.total_s.max()), **found} | (
            {} if waves >= 8 else {"period_s": math.nan}), staged, run, slowest

    best, staged, run, slowest = at(calibration)
    fast, slow = calibration.ends()
    which, margin = law.regime(run, staged.bounds_s)
    own = law.TileRun(*(float(np.broadcast_to(each, staged.accepted_s.shape)[slowest])
                        for each in run))
    terms = _terms(own, calibration) | dict(zip(
        ("compute_bound_s", "issue_bound_s", "drain_bound_s", "capacity_bound_s"),
        staged.bounds_s[:, slowest].tolist(), strict=True))
    compute = terms["n_waves"] * t_mma + terms["issue_free_s"]
    copy = terms["remote_bytes"] / terms["drain_bytes_per_s"]
    return Prediction(
        summary=best, low=at(fast)[0], high=at(slow)[0], regime=law.REGIMES[int(which[slowest])],
        margin_ratio=float(margin[slowest]), terms=terms,
        unfused={"compute_s": compute, "copy_s": copy, "total_s": compute + copy},
        fuse_gain_ratio=(compute + copy) / best["total_s"] - 1.0, t_mma_source="timed",
        calibration=calibration, parameters=record.parameters | {"issue_depth": depth},
        provenance=provenance(
            "PREDICTED", "law", f"Burst-Gap law, calibration {calibration.name}",
            machine=machine.name, calibration=calibration.name,
            calibration_badge=calibration.badge, assumed=sorted(calibration.assumed)))


def explain_timings(record: Record, machine: MachineSpec, calibration: Calibration) -> Comparison:
    """Set a run's tiles beside the law, with the reasons in words.

    Parameters
    ----------
    record : Record
        With per-tile times, for instance from `timings.read`.
    machine, calibration
        What it ran on, and that machine's parameters: `published(machine)` or a calibration.

    Returns
    -------
    Comparison
        Its `explain` says first what the tiles show, then what the law says of them.

    Raises
    ------
    NotMeasured, XStageError
        If the record holds no per-tile times, or is of another machine.
    """
    prediction = predict_timings(record, machine, calibration)
    comparison = compare(prediction,
                         dataclasses.replace(record, parameters=prediction.parameters))
    seen = [_issue_words(prediction, record), *_wait_words(prediction, record),
            *_mma_words(prediction, record)]
    return dataclasses.replace(comparison, explain=[*seen, *comparison.explain])


def _remote_ratio(record: Record) -> float:
    """Return the share of the tiles' bytes that leaves the GPU; a device counts all its stores."""
    assert record.tiles is not None  # noqa: S101  (checked by who calls)
    stored = float(record.tiles["store_bytes"].sum()) / np.unique(record.tiles["gpu"]).size
    return record.summary["remote_bytes"] / stored if stored else 0.0


def _run(tiles: Tiles, share: float, t_mma: float, depth: int, cal: Calibration,
         lanes: float) -> law.TileRun:
    """Return the law's run, an element for each GPU."""
    columns = []
    for gpu in np.unique(tiles["gpu"]):
        own = tiles[tiles["gpu"] == gpu]
        stored = own[np.argsort(own["mma_start_s"], kind="stable")]["store_bytes"]
        storing = np.flatnonzero(stored)
        n_sms = np.unique(own["sm"]).size
        columns.append((own.size, storing[-1] + 1 if storing.size else 0, n_sms,
                        stored[storing].mean() if storing.size else 0.0,
                        share * stored.sum(), cal.capacity_at(n_sms)))
    n_tiles, n_storing, n_sms, size, remote, held = np.array(columns, float).T
    return law.TileRun(n_tiles, n_storing, n_sms, t_mma, size, remote, depth,
                       cal.per_sm_bytes_per_s, cal.issue_latency_s,
                       cal.drain_bytes_per_s * lanes, held)


def _terms(run: law.TileRun, cal: Calibration) -> dict[str, float]:
    """Return what enters the law of one GPU's run, by the names every prediction has."""
    terms = {name: float(np.asarray(value)) for name, value in run._asdict().items()
             if name in ("t_mma_s", "tile_bytes", "n_tiles", "remote_bytes", "capacity_bytes",
                         "drain_bytes_per_s")}
    waves = math.ceil(terms["n_tiles"] / float(np.asarray(run.n_sms)))
    storing_waves = max(float(np.asarray(run.n_storing)) / float(np.asarray(run.n_sms)), 1.0)
    return terms | {
        "n_waves": float(waves), "issue_free_s": cal.issue_free_s(terms["tile_bytes"]),
        "drain_s": terms["remote_bytes"] / storing_waves / terms["drain_bytes_per_s"]}


def _issue_words(prediction: Prediction, record: Record) -> str:
    span, free = record.summary["issue_s"], prediction.terms["issue_free_s"]
    if math.isnan(span):
        return "No tile stores anything to another GPU."
    both = (f"a tile's stores take {text('_s', span)} to be accepted, and {text('_s', free)} "
            "where nothing is in their way (T_iss0 of "
            f"{text('tile_bytes', prediction.terms['tile_bytes'])})")
    if span - free > NEGLIGIBLE_BLOCKED_SHARE * span:
        return f"Backpressure: {both}; each is held up by {text('_s', span - free)}."
    if free - span > NEGLIGIBLE_BLOCKED_SHARE * free:
        return (f"Stores issue faster than the calibration allows: {both}. Calibrate this store "
                "path, its r_SM or t0 is another.")
    return f"No backpressure to speak of: {both}."


def _wait_words(prediction: Prediction, record: Record) -> list[str]:
    assert record.tiles is not None  # noqa: S101
    depth, stalled = prediction.parameters["issue_depth"], record.summary["stall_ratio"]
    found = []
    if not record.parameters.get("issue_depth"):
        found.append(f"ASSUMED, not known: an issue depth of {depth}, the most tiles that an SM "
                     "holds at a time; it may be more.")
    if math.isnan(stalled):
        return [*found, "How long the MMA role waits for slots is not known: a gap between two "
                "tiles can have other reasons. A column slot_wait, or the issue depth, would tell."]
    derived = str(record.provenance.get("slot_wait", "")).startswith("derived")
    mean = float(record.tiles["slot_wait_s"].mean())
    how = f", as an issue depth of {depth} has it" if derived else ""
    if stalled < NEGLIGIBLE_SHARE:
        return [*found, f"The MMA role hardly waits for slots: {stalled:.1%} of its time{how}."]
    return [*found, f"The MMA role waits for slots during {stalled:.0%} of its time{how}: "
            f"{text('_s', mean)} a tile, beside {text('_s', prediction.terms['t_mma_s'])} of MMA."]


def _mma_words(prediction: Prediction, record: Record) -> list[str]:
    median, mean = prediction.terms["t_mma_s"], record.summary["t_mma_s"]
    if abs(mean - median) <= NEGLIGIBLE_SHARE * median:
        return []
    return [f"Tiles differ: their MMAs take {text('_s', mean)} in the mean and "
            f"{text('_s', median)} in the median, which is what the law was given for all of them."]
