"""Figures show the numbers they are given, with their units, and invent none."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bokeh.document import Document
from bokeh.models import CategoricalAxis, ColumnDataSource, HoverTool, LinearColorMapper

from xstage_lab import plots
from xstage_lab.errors import UnknownName
from xstage_lab.plots import style
from xstage_lab.plots.base import thinned
from xstage_lab.plots.moe import ORDERS
from xstage_lab.record import SUMMARY_KEYS, TILE, Record

US = 1e-6
GAPS = np.linspace(0, 12e-6, 50)
V, R, Q, T0 = 148 * 32768, 717e9, 4.25 * 2**20, 0.76 * US


def record(n_tiles: int = 6, **parameters: Any) -> Record:
    """Two SMs, each issuing a tile in 2 us after 3 us of MMA; every third tile waits 1 us."""
    tiles = np.zeros(2 * n_tiles, TILE)
    number = np.tile(np.arange(n_tiles), 2)
    tiles["sm"], tiles["row"] = np.repeat([0, 1], n_tiles), np.arange(2 * n_tiles)
    tiles["slot_wait_s"] = np.where(number % 3 == 2, 1 * US, 0.0)
    tiles["mma_start_s"] = number * 4 * US + tiles["slot_wait_s"]
    tiles["mma_end_s"] = tiles["mma_start_s"] + 3 * US
    tiles["issue_start_s"] = tiles["mma_end_s"]
    tiles["issue_end_s"] = tiles["issue_start_s"] + 2 * US
    backlog = np.array([np.linspace(0, 30 * US, 100), np.linspace(0, Q, 100)])
    summary = {"total_s": 30 * US, "issue_s": 2 * US, "period_s": math.nan}
    return Record(summary=summary, parameters=parameters, provenance={"badge": "SIMULATED"},
                  tiles=tiles, backlog=backlog)


def comparison(error: float) -> SimpleNamespace:
    known = dict.fromkeys(SUMMARY_KEYS, 1e-4)
    return SimpleNamespace(predicted=known, measured=known,
                           error_ratio={**dict.fromkeys(SUMMARY_KEYS, error), "period_s": math.nan})


def tile_map(
    plot: plots.TileMap, total_s: Sequence[float] = (3e-4, 2e-4, math.nan, 4e-4),
    reason: Sequence[str] = ("", "", "no room", ""),
) -> None:
    plot.update([128, 128, 256, 64], [128, 256, 256, 64], [1, 2, 3, 1], total_s, reason)


FILLED: dict[type[plots.Plot], Callable[[Any], None]] = {
    plots.IssueGap: lambda plot: plot.update(
        {"gap_s": GAPS, "free_s": np.maximum(T0, V / R - GAPS), "lockstep_s": GAPS * math.nan},
        {"gap_s": [1e-6, 2e-6], "issue_s": [5e-6, math.nan], "badge": ["LIVE", "SIMULATED"]},
        recovery_gap_s=V / R - T0, badges="PREDICTED"),
    plots.PeriodGap: lambda plot: plot.update(
        {"gap_s": GAPS, "free_s": np.maximum(T0 + GAPS, V / R), "drain_bound_s": V / R,
         "issue_bound_s": T0 + GAPS, "additive_s": GAPS + V / R},
        {"gap_s": [1e-6], "period_s": [7e-6], "badge": "RECORDED"}),
    plots.Backlog: lambda plot: plot.update(
        record().backlog, capacity_bytes=math.inf, peak_bytes=V - R * T0),
    plots.IsolatedBurst: lambda plot: plot.update(
        {"volume_bytes": [1e6, 5e6, 9e6], "issue_s": [T0, T0, 6e-6], "issue_bound_s": T0,
         "drain_bound_s": [-5e-6, T0, 6e-6]},
        {"volume_bytes": [5e6], "issue_s": [T0], "badge": ["LIVE"]}, knee_bytes=5e6),
    plots.RateAgainstSms: lambda plot: plot.update(
        {"n_sms": [1, 10, 1, 10], "rate_bytes_per_s": [4e10, 3.7e11, 3e10, 3e11],
         "path": ["TMA", "TMA", "register", "register"]},
        {"n_sms": [1, 1, 10], "rate_bytes_per_s": [4e10, 3e10, math.nan],
         "path": ["TMA", "register", "register"], "badge": ["RECORDED", "RECORDED", "LIVE"]}),
    plots.GemmReduceScatter: lambda plot: plot.update(
        {"k": [512, 1024], "gemm_s": [2e-3, 3e-3], "law_s": 6.5e-3, "completion_s": [8e-3, 9e-3]},
        {"k": [512], "gemm_s": [2e-3], "fused_s": [6.5e-3], "badge": "RECORDED"}),
    plots.IssueAgainstCompletion: lambda plot: plot.update(
        {"payload_bytes": [512, 2048], "issue_s": [1e-7, 2e-7]},
        {"payload_bytes": [512], "stores_s": [1e-7], "release_s": [6e-7], "fence_s": [math.nan],
         "badge": "RECORDED"}),
    plots.TotalTimes: lambda plot: plot.update(
        8e-4, low_s=7e-4, high_s=9e-4, measured_s=8.1e-4, badge="SIMULATED",
        unfused={"compute_s": 6e-4, "copy_s": 4e-4},
        bounds={"compute_s": 6e-4, "issue_s": 2e-4, "drain_s": 8e-4}),
    plots.TotalCurve: lambda plot: plot.update(
        {"setting": [1, 2, 3], "total_s": [3e-4, 2e-4, math.nan], "low_s": [3e-4, 1e-4, math.nan],
         "high_s": [3e-4, 3e-4, math.nan], "unfused_s": 5e-4},
        {"setting": [2], "total_s": [2.1e-4], "badge": "SIMULATED"}, setting="issue depth"),
    plots.TileMap: tile_map,
    plots.Timeline: lambda plot: plot.update(record(), sm=1, capacity_bytes=Q),
    plots.OrdersOverTime: lambda plot: plot.update(
        {order: {"time_s": [1e-6, 2e-6], "first_ratio": [0.5, 0.1], "second_ratio": [0.2, 0.6],
                 "wait_ratio": 0.1, "issue_ratio": [0.3, 0.4]} for order in ORDERS},
        {"wave": {"time_s": [0.0, 2e-6], "backlog_bytes": [0.0, Q]}}, capacity_bytes=Q),
    plots.SpeedUp: lambda plot: plot.update(
        {"tokens": [64, 128, 256], "speedup_ratio": [1.0, 1.1, math.nan], "rule_ratio": 1.05},
        {"tokens": [128], "speedup_ratio": [1.2], "wave_s": 1.2e-4, "interleaved_s": 1e-4,
         "badge": "SIMULATED"}),
    plots.OrderMap: lambda plot: plot.update(
        {"row": ["these", "these", "model"], "setting": ["64", "128", "64"],
         "speedup_ratio": [1.2, 0.95, math.nan], "reason": ["", "", "9 GPUs"]},
        {"row": ["model"], "setting": ["paper"], "label": ["4"], "quantity": ["stall"],
         "reason": ["who"], "badge": "RECORDED"}),
    plots.OrderTimes: lambda plot: plot.update(
        {order: {"predicted_s": 8e-4, "low_s": 7e-4, "high_s": 9e-4, "measured_s": 8.1e-4,
                 "badge": "SIMULATED", "unfused": {"compute_s": 6e-4, "copy_s": 4e-4}}
         for order in ORDERS}, drain_s=5e-4),
    plots.ModeTimes: lambda plot: plot.update(
        {"row": ["fused", "serial"], "total_s": [8e-4, math.nan], "low_s": 7e-4, "high_s": 9e-4,
         "reason": ["", "no room"]}, 7e-4,
        {"row": ["fused"], "total_s": [8.1e-4], "badge": "SIMULATED"}),
    **dict.fromkeys((plots.HiddenOverGpus, plots.HiddenOverTokens), lambda plot: plot.update(
        {"setting": [1, 2, 3], "step_s": [9e-4, 5e-4, math.nan], "step_unfused_s": 9e-4,
         "total_s": [8e-4, 4e-4, math.nan], "compute_only_s": [8e-4, 4e-4, math.nan],
         "hidden_ratio": [math.nan, 0.9, math.nan], "idle_ratio": 0.1,
         "reason": ["", "", "heads do not divide"]},
        {"setting": [2], "total_s": [4.1e-4], "hidden_ratio": [0.85], "badge": "SIMULATED"})),
    plots.Residuals: lambda plot: plot.update([comparison(0.02), comparison(-0.01)], "SIMULATED",
                                              labels=["first", "second"]),
}
every_figure = pytest.mark.parametrize("kind", FILLED, ids=lambda kind: kind.name)


def filled(kind: type[plots.Plot]) -> plots.Plot:
    plot = kind()
    FILLED[kind](plot)
    return plot


def source(plot: plots.Plot, series: str) -> dict[str, Any]:
    return plot.figure.select_one({"type": ColumnDataSource, "name": series}).data


def test_all_figures_are_tested() -> None:
    """Every figure that the package offers is in the table above."""
    offered = {getattr(plots, name) for name in plots.__all__}
    assert set(FILLED) == {kind for kind in offered
                           if isinstance(kind, type) and kind is not plots.Plot}


@every_figure
def test_document_is_valid(
    kind: type[plots.Plot], caplog: pytest.LogCaptureFixture
) -> None:
    """A figure, empty or filled, is a whole document that Bokeh finds nothing wrong with."""
    with caplog.at_level(logging.WARNING):
        for plot in (kind(), filled(kind)):
            document = Document()
            document.add_root(plot.figure)
            document.validate()
            assert len(Document.from_json(document.to_json()).models) == len(document.models)
    assert not caplog.records


@every_figure
def test_update_makes_no_models(kind: type[plots.Plot]) -> None:
    """Updating a figure, once and again, changes its data and adds nothing to it."""
    plot = kind()
    before = plot.figure.references()
    FILLED[kind](plot)
    FILLED[kind](plot)
    assert plot.figure.references() == before


@every_figure
def test_every_number_is_under_the_pointer(kind: type[plots.Plot]) -> None:
    """Each renderer's tooltip asks only for columns that its source has."""
    plot = filled(kind)
    hovers = list(plot.figure.select({"type": HoverTool}))
    assert hovers
    for hover in hovers:
        for renderer in hover.renderers:
            asked = {text.split("{")[0].split()[0].removeprefix("@")
                     for _, text in hover.tooltips if text.startswith("@")}
            assert asked
            assert asked <= set(renderer.data_source.data)


@every_figure
def test_axes_say_quantity_and_unit(kind: type[plots.Plot]) -> None:
    """Every visible axis of numbers has a label, with a unit unless the axis counts."""
    counts = {"SMs that store", "K of each GPU's GEMM", "tokens of each GPU"}
    figure = filled(kind).figure
    for part in getattr(figure, "children", [figure]):
        for axis in (*part.xaxis, *part.yaxis):
            words = isinstance(axis, CategoricalAxis) or axis.major_label_overrides
            if axis.visible and not words:
                assert axis.axis_label.endswith(")") or axis.axis_label in counts


@every_figure
def test_table_is_what_is_drawn(kind: type[plots.Plot]) -> None:
    """The exported table has columns of one length, and for each series the rows that are drawn."""
    plot = filled(kind)
    table = plot.data()
    assert len({len(column) for column in table.values()}) == 1
    for series in set(table["series"]):
        for name, drawn in source(plot, series).items():
            told = table[name][table["series"] == series]
            if name in style.TEXT:
                assert told.tolist() == drawn
            else:
                scaled = np.where(np.isfinite(told), told * style.shown(name).scale, math.nan)
                np.testing.assert_array_equal(scaled, drawn)


def test_axis_units() -> None:
    """What is handed over in seconds and bytes is drawn in the units that the axis names."""
    plot = filled(plots.IssueGap)
    assert plot.figure.xaxis.axis_label == "gap G (us)"
    assert source(plot, "measured")["gap_s"].tolist() == pytest.approx([1.0, 2.0])
    held = source(filled(plots.Backlog), "backlog")["backlog_bytes"]
    assert max(held) == pytest.approx(4.25)  # MiB


def test_unknown_is_not_zero() -> None:
    """A value nobody knows stays NaN on its way to the screen and is an unbounded line's too."""
    measured = source(filled(plots.IssueGap), "measured")["issue_s"]
    assert measured[0] == pytest.approx(5.0)
    assert math.isnan(measured[1])
    assert np.isnan(source(filled(plots.Backlog), "limits")["capacity_bytes"]).all()
    times = plots.TotalTimes()
    times.update(8e-4)
    ends = dict(zip(source(times, "times")["part"], source(times, "times")["end_s"], strict=True))
    assert ends["PREDICTED"] == pytest.approx(800)
    assert np.isnan([ends["compute"], ends["copy"], ends[""]]).all()


def test_left_out_points_vanish() -> None:
    """Points of an earlier setting are not shown beside a new prediction."""
    plot = filled(plots.IssueGap)
    plot.update({"gap_s": GAPS, "free_s": T0})
    assert all(len(column) == 0 for column in source(plot, "measured").values())
    assert len(source(plot, "mark")["gap_s"]) == 0
    assert set(plot.data()["series"]) == {"predicted"}


def test_misspelt_column() -> None:
    """A column that a figure does not draw is refused with the nearest name."""
    with pytest.raises(UnknownName, match="lockstep_s"):
        plots.IssueGap().update({"gap_s": GAPS, "lokstep_s": GAPS})


def test_simulated_is_hollow() -> None:
    """Each badge has a marker of its own, and only the simulated one is hollow."""
    assert len({marker for marker, _ in style.MEASURED.values()}) == len(style.MEASURED)
    hollow = {badge for badge, (_, fill) in style.MEASURED.items() if fill == style.PAPER}
    assert hollow == {"SIMULATED"}


def test_one_colour_per_meaning() -> None:
    """No two meanings share a colour."""
    colours = [value for name, value in vars(style).items()
               if name.isupper() and isinstance(value, str) and value.startswith("#")]
    assert len(colours) >= 12
    assert len(set(colours)) == len(colours)


def test_map_keeps_infeasible_apart() -> None:
    """An infeasible cell has its reason and no time, and the best cell is the fastest feasible."""
    plot = filled(plots.TileMap)
    assert source(plot, "map")["tile"] == ["128×128", "128×256", "64×64"]
    shut = source(plot, "infeasible")
    assert (shut["tile"], shut["reason"]) == (["256×256"], ["no room"])
    assert "total_s" not in shut
    assert source(plot, "best")["tile"] == ["128×256"]
    assert plot.figure.select_one({"name": "badges"}).text.startswith("best: 128×256, depth 2")


def test_map_of_nothing_feasible() -> None:
    """A map on which nothing can run names no best cell, even after one that had one."""
    plot = filled(plots.TileMap)
    tile_map(plot, [math.nan] * 4, ["no room"] * 4)
    assert len(source(plot, "best")["tile"]) == 0
    assert "nothing here can run" in plot.figure.select_one({"name": "badges"}).text


def test_map_broadcasts_and_orders_axes() -> None:
    """Tiles stand by area and depths by number, however the arrays were given."""
    plot = plots.TileMap()
    plot.update(np.array([256, 64])[:, None], 128, np.array([10, 2])[None], np.full((2, 2), 1e-4))
    assert plot.figure.x_range.factors == ["64×128", "256×128"]
    assert plot.figure.y_range.factors == ["2", "10"]
    assert len(source(plot, "map")["tile"]) == 4


def test_timeline_is_one_sm() -> None:
    """The lanes hold the intervals of the chosen SM alone, and a wait ends where its MMA starts."""
    bars = source(filled(plots.Timeline), "tiles")
    lanes = np.array(bars["lane"])
    assert {lane: int((lanes == lane).sum()) for lane in set(lanes)} == {
        "MMA": 6, "issue": 6, "slot wait": 2}
    assert set(bars["tile_number"]) == set(range(6, 12))
    np.testing.assert_allclose(bars["duration_s"][lanes == "MMA"], 3.0)
    starts = bars["start_s"][lanes == "MMA"]
    assert all(np.isclose(starts, end).any() for end in bars["end_s"][lanes == "slot wait"])


def test_timeline_tells_layers_apart() -> None:
    """MMA bars are coloured by what each tile is, the other lanes by their own meaning."""
    plot = plots.Timeline()
    plot.update(record(), part=np.where(np.arange(12) % 2, "Linear-2", "Linear-1"))
    bars = source(plot, "tiles")
    by_lane = {lane: {p for at, p in zip(bars["lane"], bars["part"], strict=True) if at == lane}
               for lane in set(bars["lane"])}
    assert by_lane == {"MMA": {"Linear-1", "Linear-2"}, "issue": {"issue"},
                       "slot wait": {"slot wait"}}


def test_map_of_orders_is_even_handed() -> None:
    """Colours reach as far for either order, and a cell says by how much and which way."""
    plot = filled(plots.OrderMap)
    cells = source(plot, "map")
    assert cells["label"] == ["+20", "-5"]
    colors = plot.figure.select_one({"type": LinearColorMapper})
    assert colors.high == -colors.low == pytest.approx(20)
    assert source(plot, "infeasible")["reason"] == ["9 GPUs"]
    assert plot.figure.y_range.factors == ["model", "these"]  # the first row is the top one


def test_orders_share_their_axes() -> None:
    """Both orders are drawn on one time axis, shares and backlogs each on one scale."""
    wave, held, interleaved, other = filled(plots.OrdersOverTime).figure.children
    assert wave.x_range is held.x_range is interleaved.x_range is other.x_range
    assert wave.y_range is interleaved.y_range
    assert held.y_range is other.y_range


def test_timeline_without_tiles() -> None:
    """A record without per-tile times or backlog leaves the timeline empty."""
    plot = filled(plots.Timeline)
    plot.update(Record(summary={}, parameters={}, provenance={"badge": "LIVE"}))
    assert len(source(plot, "tiles")["lane"]) == len(source(plot, "backlog")["time_s"]) == 0


def test_thinning_keeps_peaks() -> None:
    """A long curve is thinned to the limit, keeps its ends' order and every extreme."""
    rng = np.random.default_rng(3)
    x = np.arange(100_000.0)
    y = rng.random(x.size)
    y[[1234, 77_777]] = 9.0, -9.0
    few_x, few_y = thinned(x, y, 500)
    assert few_x.size <= 500
    assert (np.diff(few_x) > 0).all()
    assert {1234.0, 77_777.0} <= set(few_x)
    assert (few_y == y[few_x.astype(int)]).all()


def test_paths_do_not_join() -> None:
    """The predicted lines of two transfer mechanisms are not drawn as one."""
    rate = source(filled(plots.RateAgainstSms), "predicted")["rate_bytes_per_s"]
    assert np.isnan(rate).tolist() == [False, False, True, False, False]


def test_points_of_records() -> None:
    """Columns come from summary or parameters, derived ones follow, and what is missing is NaN."""
    burst = record(gap_s=2e-6, n_producers=148, burst_bytes=32768)
    gemm = record(tile_m=128, tile_n=256, issue_depth=3)
    table = plots.points([burst], "gap_s", "issue_s", "period_s", "volume_bytes", "nothing_s")
    assert table["gap_s"] == [2e-6]
    assert table["volume_bytes"] == [V]
    assert np.isnan([table["period_s"], table["nothing_s"]]).all()
    assert plots.points([gemm], "total_s", setting="tile")["setting"] == ["128×256"]
    assert plots.points([gemm], setting="issue_depth") == {"setting": [3], "badge": ["SIMULATED"]}


def test_residuals_keep_unknown() -> None:
    """A quantity that was not measured has no residual, and each run has its place and label."""
    drawn = source(filled(plots.Residuals), "measured")
    errors = dict(zip(drawn["quantity"], drawn["error_ratio"], strict=True))
    assert sum(np.isnan(drawn["error_ratio"])) == 2  # the period of both runs
    assert len(errors) == len(SUMMARY_KEYS)
    assert drawn["label"] == ["first"] * 5 + ["second"] * 5
    assert len(set(np.round(drawn["place"], 6))) == 10
