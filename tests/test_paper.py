"""Published numbers stand beside the law's, and what is fitted to one is tested on others."""

from __future__ import annotations

import functools
import json
import math
from typing import Any

import pytest

from xstage_lab import catalog
from xstage_lab.__main__ import main
from xstage_lab.paper import TABLES, Table, table
from xstage_lab.paper.table import lines
from xstage_lab.record import to_plain

worked_out = functools.cache(table)


def rows_of(name: str) -> list[dict[str, Any]]:
    return worked_out(name).rows


@pytest.mark.parametrize("name", TABLES)
def test_every_table_is_whole(name: str) -> None:
    """A table has its name, a source, finite figures or none, and prints with every row."""
    found = worked_out(name)
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


def test_tables_are_made_anew() -> None:
    """A caller who changes a table changes nobody else's."""
    first: Table = table("constants")
    first.rows.clear()
    assert table("constants").rows
