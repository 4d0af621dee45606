"""How near the law comes to what others published, nothing fitted to what it predicts."""

from __future__ import annotations

from bench.figures import Figure
from xstage_lab.paper import worked_out
from xstage_lab.paper.table import Table

CONSTANTS_ASKED, WITHIN_ASKED = 1.0, 10.0  # percent


def measure() -> list[Figure]:
    """Work out the tables of published numbers and set their summaries beside what is asked."""
    return [*_constants(worked_out("constants")), *_stall(worked_out("moe-stall")),
            *_stall_forms(worked_out("moe-stall-forms")),
            *_stall_simulated(worked_out("moe-stall-simulated")),
            *_attention(worked_out("attention")), *_sweeps(worked_out("store-sweeps")),
            *_gemm(worked_out("gemm-rs")), *_messages(worked_out("issue-completion"))]


def _percent(what: str, ratio: float, asked: float = WITHIN_ASKED, note: str = "") -> Figure:
    return Figure(what=what, value=100 * abs(ratio), asked=asked, unit="%", note=note)


def _constants(table: Table) -> list[Figure]:
    return [_percent("X-Stage's knee from R, Q and T_iss0", table.summary["worst_error_ratio"],
                     CONSTANTS_ASKED),
            _percent("X-Stage's constants on the simulated machine, worst",
                     table.summary["worst_simulated_error_ratio"], CONSTANTS_ASKED)]


def _stall(table: Table) -> list[Figure]:
    return [Figure(what="published stall predictions reproduced to rounding",
                   value=table.summary["n_reproduced"], asked=7, at_least=True, unit="rows")]


def _stall_forms(table: Table) -> list[Figure]:
    published, *others = table.rows
    return [Figure(what=f"stall, left-out RMS of '{row['form']}'",
                   value=1e6 * row["left_out_rms_s"], asked=1e6 * published["left_out_rms_s"],
                   unit="us", note="the published form's is asked") for row in others]


def _stall_simulated(table: Table) -> list[Figure]:
    return [Figure(what="mean wait of simulated runs, worst error of Q and slots taking the start",
                   value=1e6 * table.summary["worst_law_error_s"],
                   asked=1e6 * table.summary["worst_published_form_error_s"], unit="us",
                   note="the published form's is asked")]


def _attention(table: Table) -> list[Figure]:
    rows, found = len(table.rows), table.summary
    return [
        Figure(what="attention, hidden shares reproduced to rounding",
               value=found["n_hidden_reproduced"], asked=rows - 1, at_least=True, unit="rows",
               note="the last is above 100 % and reported as 100 %"),
        Figure(what="attention, speed-ups reproduced to rounding",
               value=found["n_speedups_reproduced"], asked=rows, at_least=True, unit="rows"),
        _percent("attention, fused time with nothing fitted, worst",
                 found["worst_law_error_ratio"],
                 note=f"with the last wave {found['worst_law_with_end_error_ratio']:.1%}, "
                      f"completion-coupled {found['worst_completion_coupled_error_ratio']:.0%}")]


def _sweeps(table: Table) -> list[Figure]:
    found = table.summary
    return [
        _percent("store sweeps below the plateau, worst",
                 found["worst_stores_below_plateau_error_ratio"],
                 note=f"{found['n_stores_below_plateau']:.0f} points; completion-coupled "
                      f"{found['worst_completion_coupled_stores_below_plateau_error_ratio']:.0%}"),
        _percent("store sweeps, all points, worst", found["worst_stores_all_points_error_ratio"]),
        _percent("load sweeps below the plateau, worst",
                 found["worst_loads_below_plateau_error_ratio"],
                 note="the law claims nothing for loads")]


def _gemm(table: Table) -> list[Figure]:
    found = table.summary
    coupled = f"completion-coupled {found['worst_completion_coupled_error_ratio']:.0%}"
    return [
        _percent("GEMM + reduce-scatter but the crossover, worst",
                 found["worst_law_but_crossover_error_ratio"], note=coupled),
        _percent("GEMM + reduce-scatter at the crossover", found["crossover_law_error_ratio"],
                 note="reported, not fitted"),
        _percent("GEMM + reduce-scatter, order of the tiles known, worst of all rows",
                 found["worst_law_staged_error_ratio"], note=coupled)]


def _messages(table: Table) -> list[Figure]:
    machines = dict.fromkeys(str(row["machine"]) for row in table.rows)
    return [_percent(f"issue time of one warp's messages, {machine}, worst",
                     table.summary[f"worst_{machine}_law_error_ratio"]) for machine in machines]
