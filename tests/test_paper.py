"""Published numbers stand beside the law's, and what is fitted to one is tested on others."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from xstage_lab import catalog
from xstage_lab.__main__ import main
from xstage_lab.devices.recorded import published_gemm_rs
from xstage_lab.paper import (
    TABLES,
    Table,
    attention_simulated,
    dispatch,
    gemm_rs,
    grid,
    mega_moe,
    moe_kernel,
    moe_spans,
    stall,
    sweeps,
    wave_lag,
    worked_out,
)
from xstage_lab.paper.table import lines, row_name
from xstage_lab.record import to_plain
from xstage_lab.units import display

once = functools.cache(worked_out)


@pytest.fixture(autouse=True, scope="module")
def short_grid() -> Iterator[None]:
    """One length of few tokens instead of three: a third of the grid, in little time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid, "TOKENS", (64,))
        patch.setattr(moe_spans, "TOKENS", 2048)
        yield


def rows_of(name: str) -> list[dict[str, Any]]:
    return once(name).rows


@pytest.mark.parametrize("name", TABLES)
def test_every_table_is_whole(name: str) -> None:
    """A table has its name, a source, finite figures or none, and prints with every row."""
    found = once(name)
    assert found.name == name
    assert found.source
    assert found.title
    assert found.rows
    for row in found.rows:
        for column, value in row.items():
            assert value is None or isinstance(value, str | bool | int | float), column
            assert not isinstance(value, float) or math.isfinite(value), column
    assert all(math.isfinite(value) for value in found.summary.values())
    told = lines(found)
    first = next(iter(found.rows[0].values()))
    assert sum(line.startswith(str(first)) for line in told) >= 1
    assert set(to_plain({"table": found})["table"]) >= {"rows", "fitted_on", "summary", "notes"}


def test_the_command_line_prints_tables(capsys: pytest.CaptureFixture[str]) -> None:
    """One table prints as an object or as lines, and an unknown name is answered with names."""
    assert main(["paper", "--table", "constants", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"tables"}
    assert set(found["tables"]) == {"constants"}
    assert main(["paper", "--table", "constants"]) == 0
    assert "X-Stage" in capsys.readouterr().out
    assert main(["paper", "--table", "constant"]) == 2
    assert "did you mean constants" in capsys.readouterr().err


def test_constants_follow_from_three() -> None:
    """V/R, the recovery gap, the peak backlog and the knee follow from R, Q and T_iss0."""
    known = catalog.constants()
    by_name = {row["quantity"]: row for row in rows_of("constants")}
    volume = 148 * 32 * 1024
    drain_s = volume / known["drain_rate_bytes_per_s"]
    assert by_name["drain_time_s"]["law"] == pytest.approx(drain_s)
    assert by_name["recovery_gap_s"]["law"] == pytest.approx(drain_s - 0.76e-6)
    assert by_name["peak_backlog_bytes"]["law"] == pytest.approx(
        volume * (1 - 0.76e-6 / drain_s))
    assert by_name["knee_per_producer_bytes"]["law"] == pytest.approx(33 * 1024, abs=51)


def test_the_simulated_device_shows_the_constants() -> None:
    """What is measured on the simulated machine is within 1 % of what the constants say."""
    simulated = [row for row in rows_of("constants") if row.get("simulated") is not None]
    assert len(simulated) >= 8
    assert all(abs(row["simulated_error_ratio"]) < 0.01 for row in simulated)


def test_the_published_stall_prediction_is_reproduced() -> None:
    """Every published predicted stall is (span - t_mma)+ to the rounding of three figures."""
    rows = rows_of("moe-stall")
    assert len(rows) == 7
    for row in rows:
        assert row["reproduced"]
        assert row["law_s"] == pytest.approx(row["stall_predicted_s"], abs=0.0151e-6)
    over = [row["error_s"] for row in rows if row["stall_predicted_s"] > 0]
    assert len(over) == 6
    assert all(0.44e-6 < error < 0.83e-6 for error in over)


def test_a_form_does_not_see_the_row_it_predicts() -> None:
    """Changing one measured stall changes no left-out prediction of that row."""
    published = catalog.table("xstage_moe_stall")
    changed = published.copy()
    changed["stall_measured_s"][2] += 1e-6
    for form in stall.FORMS:
        before, after = (
            stall.fitted(form, rows).left_out_errors_s[2] + rows["stall_measured_s"][2]
            for rows in (published, changed))
        assert after == pytest.approx(before, abs=1e-12), form.name


def test_fits_are_least_squares() -> None:
    """No form fits better a little to either side of its fitted parameter."""
    rows = catalog.table("xstage_moe_stall")
    for form in stall.FORMS[1:]:
        best = stall.fitted(form)
        for factor in (0.99, 1.01):
            other = form.stall_s(factor * best.parameter, rows["span_wave_s"],
                                 rows["t_mma_linear2_s"]) - rows["stall_measured_s"]
            assert np.sum(other**2) > np.sum(best.errors_s**2), form.name


def test_waits_of_a_run_on_the_simulated_device() -> None:
    """The mean wait over a run is what Q and the slots leave of it, and the late one is whole."""
    rows = rows_of("moe-stall-simulated")
    assert {row["issue_depth"] for row in rows} == {2, 3}
    for row in rows:
        assert row["law_s"] == pytest.approx(row["simulated_wait_s"], abs=0.02e-6)
        if row["n_run_tiles"] >= 14:
            assert row["simulated_wait_steady_s"] == pytest.approx(
                row["published_form_s"], abs=0.02e-6)
    of_depth_2 = [row["simulated_wait_s"] for row in rows[:4]]
    assert of_depth_2 == sorted(of_depth_2)


def test_a_long_run_waits_as_published() -> None:
    """In an endless run the start no longer counts and the published form is left."""
    endless = stall.run_wait(9e-6, 5e-6, 1e9, 2, 6e-6)
    assert endless == pytest.approx(stall.published_wait(9e-6, 5e-6), rel=1e-6)
    assert stall.run_wait(5e-6, 9e-6, 20, 2, 6e-6) == 0.0


def test_attention_shares_are_not_cut() -> None:
    """Hidden shares and speed-ups come out as reported, but for the one above 100 %."""
    *rows, last = rows_of("attention")
    assert all(row["hidden_reproduced"] and row["speedup_reproduced"] for row in rows)
    assert last["speedup_reproduced"]
    assert last["hidden_ratio"] == pytest.approx(718.3 / 687.2)
    for row in (*rows, last):
        assert row["law_s"] == max(row["fa3_only_s"], row["serial_s"] - row["fa3_only_s"])
        assert abs(row["law_error_ratio"]) < abs(row["completion_coupled_error_ratio"])
        assert row["completion_coupled_error_ratio"] == pytest.approx(row["speedup"] - 1)


def test_sweeps_are_predicted_from_their_ends() -> None:
    """Between the first and the last point of a store sweep the law is within 10 %."""
    rows = rows_of("store-sweeps")
    assert len(rows) == catalog.table("sm_sweeps").size
    tested = [row for row in rows if row["direction"] == "write" and not row["fitted_to"]]
    assert sum(row["below_plateau"] for row in tested) == 9
    assert all(abs(row["law_error_ratio"]) < 0.10 for row in tested)
    for row in rows:
        if row["fitted_to"]:
            for form in ("law", "completion_coupled"):
                assert row[f"{form}_error_ratio"] == pytest.approx(0.0, abs=1e-9)
        assert ("simulated_bytes_per_s" in row and row["simulated_bytes_per_s"] is not None) == (
            row["direction"] == "write")


def test_points_between_do_not_enter_a_sweep() -> None:
    """A sweep's parameters stay when any point but its first and last changes."""
    for sweep in sweeps.sweeps():
        middle = [(n_sms, 2 * rate) for n_sms, rate in sweep.points[1:-1]]
        changed = sweep._replace(points=[sweep.points[0], *middle, sweep.points[-1]])
        assert changed.per_sm_bytes_per_s == sweep.per_sm_bytes_per_s
        assert changed.drain_bytes_per_s == sweep.drain_bytes_per_s


def test_gemm_reduce_scatter_is_predicted_from_its_shortest_row() -> None:
    """R from K = 512 alone gives the other rows within 10 %, the crossover only in tile order."""
    rows = rows_of("gemm-rs")
    assert [row["fitted_to"] for row in rows] == [True, False, False, False, False]
    assert [row["k_per_gpu"] for row in rows if row["crossover"]] == [2048]
    for row in rows:
        assert row["crossover"] or abs(row["law_error_ratio"]) < 0.10
        assert abs(row["law_staged_error_ratio"]) < 0.10
        assert row["simulated_s"] == pytest.approx(row["law_staged_s"], rel=0.01)
        assert abs(row["completion_coupled_error_ratio"]) > abs(row["law_error_ratio"])


def test_only_the_shortest_row_gives_the_drain_rate() -> None:
    """Other rows' fused times change neither the drain rate nor any prediction."""
    records = published_gemm_rs()
    slower = [dataclasses.replace(record, summary=record.summary | {
        "total_s": record.summary["total_s"] * (1 if record.parameters["k"] == 512 else 2)})
        for record in records]
    before, after = gemm_rs.plain_forms(records), gemm_rs.plain_forms(slower)
    assert after.drain_bytes_per_s == before.drain_bytes_per_s
    assert (after.law_s == before.law_s).all()


def test_issue_is_a_line_and_completion_is_not_issue() -> None:
    """Two payloads give the others' issue time on H20; a fence costs several times the stores."""
    rows = rows_of("issue-completion")
    tested = [row for row in rows if row["tested"]]
    assert len(tested) == 4
    assert all(not row["past_l1"] and row["payload_bytes"] > 0 for row in tested)
    assert all(abs(row["law_error_ratio"]) < 0.01 for row in tested if row["machine"] == "H20")
    for row in rows:
        if row["fitted_to"]:
            assert row["law_s"] == pytest.approx(row["stores_s"])
        if row["law_release_error_ratio"] is not None:
            assert abs(row["law_release_error_ratio"]) < 0.05
        if row["payload_bytes"] == 32768:
            assert row["fence_s"] > 4 * row["stores_s"]


def predicted(found: Table) -> list[dict[str, Any]]:
    """Columns that the law or the simulated device gave, but for differences to published ones."""
    return [{name: value for name, value in row.items()
             if name.startswith(("law", "simulated")) and "error" not in name}
            for row in found.rows]


@pytest.mark.parametrize(("file", "table", "measured"), [
    ("h100_wave_lag", wave_lag.wave_lag_table, ("wave_s", "lag_s", "speedup_reported")),
    ("megamoe_pr316", mega_moe.mega_moe_table, ("time_s", "flop_per_s")),
    ("xstage_fa3_a2a", attention_simulated.attention_simulated_table, ("serial_s", "fused_s")),
    ("xstage_moe_stall", moe_spans.moe_spans_table, (
        "span_wave_s", "span_interleaved_s", "stall_measured_s", "stall_predicted_s")),
])
def test_measured_values_enter_no_prediction(
        file: str, table: Callable[[Any], Table], measured: tuple[str, ...]) -> None:
    """Other published measurements of the same runs leave every prediction as it is."""
    rows = catalog.table(file)[:2]
    changed = rows.copy()
    for i, column in enumerate(measured):
        changed[column] *= 1.5 + i
    before, after = table(rows), table(changed)
    assert predicted(before) == predicted(after)
    assert before.rows != after.rows


def test_the_gain_of_the_lag_is_mostly_left_over() -> None:
    """Times and speed-ups agree, and neither form nor the dispatch explains half of the gain."""
    found = once("wave-lag")
    assert [row["tokens_per_rank"] for row in found.rows] == [64, 256, 1024, 2048, 4096, 8192]
    assert all(row["speedup_reproduced"] for row in found.rows)
    for form in wave_lag.FORMS[:-1]:
        shares = [(row[f"{form}_speedup"] - 1) / (row["speedup"] - 1) for row in found.rows]
        assert found.summary[f"{form}_most_explained_ratio"] == pytest.approx(max(shares))
        assert max(shares) < 0.5
    for row in found.rows:
        assert row["law_speedup"] == pytest.approx(row["simulated_speedup"], rel=0.03)
        assert row["law_combine_s"] == pytest.approx(2 * row["law_dispatch_s"])  # bf16, not fp8


def test_dispatch_on_the_same_egress_never_speeds_up() -> None:
    """Tokens on the egress add time, at least until the path has drained them and the combine."""
    machine = moe_kernel.machine_of("H100-SXM")
    moe = catalog.moe_layer("MiMo-V2.5", 1024)
    tuning = moe_kernel.tuning_of(moe, machine)
    alone = moe_kernel.times(moe, machine, tuning)
    by_law, simulated = (of(moe, machine, tuning) for of in (
        dispatch.law_total_s, dispatch.simulated_total_s))
    assert alone.law_s < by_law
    assert alone.simulated_s < simulated
    stored = moe.gpu_rows[0] * moe.hidden * 2 * 7 / 8
    drained_s = (dispatch.dispatch_bytes(moe) + stored) / machine.link.egress_bytes_per_s
    assert min(by_law, simulated) > drained_s


def test_flop_rates_of_the_fused_moe_layer_are_reproduced() -> None:
    """Published FLOP rates follow from shape and time; memory alone sets the time of one token."""
    rows = rows_of("mega-moe")
    assert all(row["reproduced"] for row in rows)
    for row in rows:
        model = catalog.moe_layer(row["model"], row["tokens_per_rank"])
        expert = 3 * model.hidden * model.intermediate
        fetched_s = row["n_active_experts"] * expert / 8e12
        assert row["law_s"] > 0.99 * fetched_s
        if row["tokens_per_rank"] == 1:
            assert row["n_active_experts"] == model.top_k
            assert row["law_half_weights_s"] == pytest.approx(row["law_s"] / 2, rel=0.01)
        if row["tokens_per_rank"] >= 8192:
            assert row["law_half_weights_s"] == pytest.approx(row["law_s"], rel=0.01)


def test_the_grid_is_built_as_published() -> None:
    """84 layers: 7 models, 2 precisions, 2 routings and 3 lengths, each once."""
    found = [(model, moe.dtype, moe.routing, moe.tokens)
             for model, moe in grid.layers((1024, 2048, 4096))]
    assert len(found) == len(set(found)) == 84
    assert [len({key[i] for key in found}) for i in range(4)] == [7, 2, 2, 3]


def test_the_grid_sums_up_its_rows() -> None:
    """Published statistics stand beside those of the layers' speed-ups, which are of the times."""
    found, layers = once("grid"), rows_of("grid-layers")
    assert len(layers) == found.summary["n_layers"] == 28
    by_name = {row["statistic"]: row for row in found.rows}
    for form in ("law", "simulated"):
        speedups = np.array([row[f"{form}_wave_s"] / row[f"{form}_interleaved_s"]
                             for row in layers])
        for name, value in (("geomean", speedups.prod() ** (1 / 28)), ("max", speedups.max()),
                            ("min", speedups.min()), ("median", np.median(speedups))):
            assert by_name[name][f"{form}_speedup"] == pytest.approx(value)
    assert [row["speedup"] for row in found.rows] == [1.18, 1.17, 1.62, 0.94]
    assert not found.fitted_on


def test_assumptions_of_the_grid_start_from_it() -> None:
    """The first row is the grid's own of that length, and every change moves the distribution."""
    published, base, *others = rows_of("grid-assumptions")
    names = [f"law_{name}" for name in grid.STATISTICS]
    assert published["geomean"] == 1.18
    assert [base[name] for name in names] == pytest.approx(
        [row["law_speedup"] for row in rows_of("grid")])
    assert all([row[name] for name in names] != [base[name] for name in names] for row in others)


def test_waits_of_moe_models_follow_from_their_compute_times() -> None:
    """V/R of 192 x 128 tiles less the compute time is nearer than the published form."""
    rows = [row for row in rows_of("moe-spans") if row["model"] != moe_spans.UNKNOWN_SHAPE]
    assert len(rows) == 12
    tall = [row for row in rows if row["tile_m"] == 192]
    volume = 148 * 192 * 128 * 2 * 7 / 8
    assert tall[0]["law_span_s"] == pytest.approx(volume / 717e9)
    by_law, form = (np.abs([row[f"{name}_wait_error_s"] for row in tall])
                    for name in ("law", "published_form"))
    assert np.median(by_law) < 0.5 * np.median(form)
    for row in rows:
        assert row["simulated_wave_wait_s"] <= row["simulated_one_wave_wait_s"] + 1e-9
        assert row["simulated_one_wave_wait_s"] <= row["law_wait_s"] + 0.05e-6
        assert row["simulated_one_wave_span_s"] < 1.05 * row["law_span_s"]


def test_attention_follows_from_attention_alone() -> None:
    """Law and simulation give fused times within 1 %, and never below attention alone."""
    for row in rows_of("attention-simulated"):
        for form in ("law", "simulated"):
            assert row[f"{form}_fused_s"] >= row["fa3_only_s"]
            assert row[f"{form}_fused_s"] < row[f"{form}_serial_s"] < row["serial_s"]
            assert abs(row[f"{form}_fused_error_ratio"]) < 0.01
        assert row["added_s"] == pytest.approx(row["fused_s"] - row["fa3_only_s"])
        assert row["achieved_flop_per_s"] < catalog.machine("H100-SXM").bf16_flop_per_s


def test_the_reported_loss_at_8_gpus_does_not_come_out() -> None:
    """A step's parts add up, and what each further peer would have to cost makes 8 GPUs lose."""
    found = once("ulysses-turnover")
    assert found.summary["n_told_as_reported"] == 4
    for row in found.rows:
        parts = (row[f"law_{name}_s"] for name in ("attention", "output", "input", "fixed"))
        assert row["law_step_s"] == pytest.approx(sum(parts))
    four, eight = (row["law_step_s"] for row in found.rows[2:4])
    costs = 4 * found.summary["H100-SXM_losing_per_peer_s"]
    assert four + 3 * costs == pytest.approx(eight + 7 * costs)


@pytest.mark.parametrize("name", TABLES)
def test_what_is_compared_is_there(name: str) -> None:
    """Compared columns exist and hold numbers of one unit, and their rows have names."""
    found = once(name)
    for compared in found.compared:
        for column in (compared.published, *compared.predicted):
            values = [row.get(column) for row in found.rows]
            assert any(isinstance(value, float) for value in values), column
            assert display(column) == display(compared.published)
    if found.compared:
        assert all(row_name(row) for row in found.rows)


def test_tables_are_made_anew() -> None:
    """A caller who changes a table changes nobody else's."""
    first: Table = worked_out("moe-stall")
    first.rows.clear()
    assert worked_out("moe-stall").rows
