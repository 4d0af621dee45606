"""Attention with Ulysses' all-to-all, serial and fused, as X-Stage reports it."""

from __future__ import annotations

from typing import Any

from xstage_lab import catalog, law
from xstage_lab.paper.constants import BURST_BYTES, N_PRODUCERS
from xstage_lab.paper.table import X_STAGE, Compared, Table, error_ratio, spread
from xstage_lab.units import text

HIDDEN_ROUNDING, SPEEDUP_ROUNDING = 0.005, 0.0005  # percent, and three decimals


def attention_table() -> Table:
    """Reproduce hidden share and speed-up, and predict the fused time with nothing fitted."""
    known = catalog.constants()
    end_s = float(law.period(0.0, 0.0, N_PRODUCERS * BURST_BYTES,
                             known["drain_rate_bytes_per_s"]))
    rows = [_row({name: float(row[name]) for name in row.dtype.names if name != "source"}, end_s)
            for row in catalog.table("xstage_fa3_a2a")]
    short = [row for row in rows if not row["hidden_reproduced"]]
    return Table(
        name="attention", compared=(Compared(
            "fused_s", ("law_s", "law_with_end_s", "completion_coupled_s")),),
        title="Attention with all-to-all, fused, against the sequence length",
        source=X_STAGE, rows=rows, fitted_on={},
        summary={
            "n_hidden_reproduced": float(sum(row["hidden_reproduced"] for row in rows)),
            "n_speedups_reproduced": float(sum(row["speedup_reproduced"] for row in rows)),
            **spread("law_error_ratio", (row["law_error_ratio"] for row in rows)),
            **spread("law_with_end_error_ratio",
                     (row["law_with_end_error_ratio"] for row in rows)),
            **spread("completion_coupled_error_ratio",
                     (row["completion_coupled_error_ratio"] for row in rows))},
        notes=(
            "The hidden share is (serial - fused)/(serial - FA3 only), the speed-up serial/fused. "
            + " ".join(f"At {row['tokens']} tokens it is {text('_ratio', row['hidden_ratio'], 4)}, "
                       "fused being faster than attention alone; "
                       f"{text('_ratio', row['hidden_reported_ratio'])} is reported, so that it "
                       "was cut or read off. It is not cut here." for row in short),
            "The law, nothing fitted: the gap between an SM's stores, the next loop over keys, "
            "outlasts what its tile needs to drain, and only the longer of attention and "
            "all-to-all is left, max(FA3, serial - FA3). The completion-coupled form is their "
            "sum, serial.",
            f"`law with end` adds the drain of the last wave, {text('_s', end_s)}. How large it is "
            "was not published with this table: it is V/R of X-Stage's constants, 148 tiles of "
            "128 queries by 128 dimensions in bf16, 32 KiB each, which is ASSUMED. It halves the "
            "error of the shortest row; the rest there may be the start of a longer kernel.",
            "Serial less FA3 is the all-to-all's own launch as well as its stores, so that it is "
            "no drain time to take R from."))


def _row(row: dict[str, float], end_s: float) -> dict[str, Any]:
    fa3, serial, fused = row["fa3_only_s"], row["serial_s"], row["fused_s"]
    hidden, speedup = (serial - fused) / (serial - fa3), serial / fused
    by_law = max(fa3, serial - fa3)
    return {
        "tokens": int(row["tokens_m"]), "fa3_only_s": fa3, "serial_s": serial, "fused_s": fused,
        "hidden_reported_ratio": row["hidden_reported_ratio"], "hidden_ratio": hidden,
        "hidden_reproduced": abs(hidden - row["hidden_reported_ratio"]) <= HIDDEN_ROUNDING,
        "speedup_reported": row["speedup_reported"], "speedup": speedup,
        "speedup_reproduced": abs(speedup - row["speedup_reported"]) <= SPEEDUP_ROUNDING,
        "law_s": by_law, "law_error_ratio": error_ratio(by_law, fused),
        "law_with_end_s": by_law + end_s,
        "law_with_end_error_ratio": error_ratio(by_law + end_s, fused),
        "completion_coupled_s": serial,
        "completion_coupled_error_ratio": error_ratio(serial, fused),
    }
