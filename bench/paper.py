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
            *_gemm(worked_out("gemm-rs")), *_messages(worked_out("issue-completion")),
            *_attention_tiles(worked_out("attention-simulated")),
            *_turnover(worked_out("ulysses-turnover")), *_wave_lag(worked_out("wave-lag")),
            *_mega_moe(worked_out("mega-moe")), *_spans(worked_out("moe-spans")),
            *_grid(worked_out("grid"))]


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


def _attention_tiles(table: Table) -> list[Figure]:
    return [_percent(f"attention tile by tile, fused time, {form}, worst",
                     table.summary[f"worst_{form}_fused_error_ratio"],
                     note="attention alone, most of that time, is given; shape ASSUMED")
            for form in ("law", "simulated")]


def _turnover(table: Table) -> list[Figure]:
    return [Figure(what="FLUX.1 over 1 to 8 GPUs, gains and losses as reported",
                   value=table.summary["n_told_as_reported"], asked=table.summary["n_told"],
                   at_least=True, unit="steps", note="the loss at 8 GPUs does not come out")]


def _wave_lag(table: Table) -> list[Figure]:
    """Return the shares of the measured gain that are explained; all of it is what one asks."""
    said = {"law": "the store path, by the law", "simulated": "the store path, simulated",
            "simulated_dispatch": "path and dispatch, simulated",
            "simulated_dispatch_late": "path and a lag beyond the dispatch, simulated"}
    return [Figure(what=f"gain of a lag on H100 explained by {words}, median",
                   value=100 * table.summary[f"{form}_median_explained_ratio"], asked=100.0,
                   at_least=True, unit="%",
                   note=f"{table.summary[f'{form}_most_explained_ratio']:.0%} at most")
            for form, words in said.items()]


def _mega_moe(table: Table) -> list[Figure]:
    found = table.summary
    return [
        Figure(what="Mega MoE, FLOP rates reproduced to rounding",
               value=found["n_flop_rates_reproduced"], asked=len(table.rows), at_least=True,
               unit="rows"),
        _percent("Mega MoE, many tokens, time by the law, median",
                 found["median_law_many_tokens_error_ratio"],
                 note="compute at the measured FP8 GEMM rate, which the kernel does not reach"),
        _percent("Mega MoE, all rows, time by the law, worst", found["worst_law_error_ratio"],
                 note="at one token fixed costs that are not modelled")]


def _spans(table: Table) -> list[Figure]:
    found = table.summary
    asked = 1e6 * found["median_published_form_wait_error_s"]
    return [Figure(what=f"stalls of MoE models, tiles of 192 x 128, {words}, median error",
                   value=1e6 * found[f"median_{form}_wait_error_s"], asked=asked, unit="us",
                   note="the published form's is asked")
            for form, words in (("law", "V/R - t_mma"), ("one_wave", "simulated in one wave"))]


def _grid(table: Table) -> list[Figure]:
    found = table.summary
    return [_percent(f"interleaving's speed-up over 84 layers, geometric mean, {form}",
                     found[f"{form}_geomean_error_ratio"],
                     note=f"{found['n_gaining']:.0f} layers gain, {found['n_losing']:.0f} lose; "
                          "skew, lengths and waves ASSUMED") for form in ("law", "simulated")]
