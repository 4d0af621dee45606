"""Published figures become SI, unknown ones stay unknown, and users' files are read or refused."""

from __future__ import annotations

import csv
import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xstage_lab import catalog
from xstage_lab.datafiles import data_folder
from xstage_lab.errors import FileRejected, UnknownFact, UnknownName
from xstage_lab.machinefile import LINK_COLUMNS, MACHINE_COLUMNS
from xstage_lab.spec import LinkSpec, MachineSpec
from xstage_lab.tables import scaled, to_si

# All but an example of what users bring: times of tiles, read by `timings`.
TABLES = sorted({path.stem for path in data_folder().glob("*.csv")} - {"timings_example"})
MEASURED = [name for name in catalog.machines() if name != "MI355X"]
QUANTITIES = [
    f.name for f in dataclasses.fields(LinkSpec) if f.name.endswith(("_s", "_bytes"))
]  # fmt: skip


def published(table: str) -> list[dict[str, str]]:
    """The rows of a file of `data/`, as they stand there."""
    with (data_folder() / f"{table}.csv").open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.parametrize(
    ("column", "written", "si_name", "value"),
    [
        ("time_us", 0.76, "time_s", 7.6e-7),
        ("gemm_ms", 2.071, "gemm_s", 2.071e-3),
        ("gb_per_s", 717.0, "bytes_per_s", 7.17e11),
        ("store_gb_per_s_low", 628.0, "store_low_bytes_per_s", 6.28e11),
        ("hbm_tb_per_s", 3.35, "hbm_bytes_per_s", 3.35e12),
        ("smem_per_cta_kib", 227.0, "smem_per_cta_bytes", 232448.0),
        ("path_capacity_mib", 4.25, "path_capacity_bytes", 4456448.0),
        ("clock_mhz", 1830.0, "clock_hz", 1.83e9),
        ("bf16_tflops_measured", 794.5, "bf16_measured_flop_per_s", 7.945e14),
        ("hidden_percent_reported", 88.0, "hidden_reported_ratio", 0.88),
        ("payload_bytes", 512.0, "payload_bytes", 512.0),
        ("experts", 256.0, "experts", 256.0),
    ],
)
def test_units(column: str, written: float, si_name: str, value: float) -> None:
    """A column's unit becomes the SI suffix of its name and the factor of its numbers."""
    found, scale = to_si(column)
    assert found == si_name
    assert scaled(written, scale) == pytest.approx(value, rel=1e-15)


def test_machine_by_hand() -> None:
    """A published machine has the figures of its row, in SI."""
    b200 = catalog.machine("B200-SXM")
    assert (b200.n_sms, b200.max_gpus, b200.link.topology) == (148, 8, "switch")
    assert (b200.bf16_flop_per_s, b200.fp8_flop_per_s) == (1.745e15, 3.433e15)
    assert (b200.hbm_bytes_per_s, b200.l2_bytes) == (8e12, 120 * 1024**2)
    assert (b200.smem_per_cta_bytes, b200.clock_hz) == (227 * 1024, 1.965e9)
    link = b200.link
    assert (link.name, link.vendor_bytes_per_s) == ("NVLink5", 9e11)
    assert link.egress_bytes_per_s == 7.17e11
    assert (link.egress_low_bytes_per_s, link.egress_high_bytes_per_s) == (6.28e11, 7.22e11)
    assert "X-Stage" in link.source
    assert "public notes" in b200.source


def test_law_constants_follow() -> None:
    """The constants that X-Stage reports give the checks that follow from them by arithmetic."""
    link = catalog.machine("B200-SXM").link
    rate, capacity = link.egress_bytes_per_s, link.path_capacity_bytes
    volume = 148 * 32 * 1024
    issue_s = 32 * 1024 / link.per_sm_bytes_per_s
    assert issue_s == pytest.approx(0.76e-6, rel=1e-6)
    assert volume / rate == pytest.approx(6.76e-6, abs=0.005e-6)
    assert volume / rate - issue_s == pytest.approx(6.00e-6, abs=0.005e-6)
    assert (volume - rate * issue_s) / 2**20 == pytest.approx(4.105, abs=0.001)
    knee = capacity / (148 * (1 - rate / (148 * link.per_sm_bytes_per_s)))
    assert knee / 1024 == pytest.approx(33.0, abs=0.2)
    reported = catalog.constants()
    assert reported["isolated_knee_per_producer_bytes"] == 33 * 1024
    assert (reported["drain_rate_bytes_per_s"], reported["outstanding_capacity_bytes"]) == (
        rate, capacity)  # fmt: skip
    assert reported["speedup_interleaved_min_ratio"] == 0.94


@pytest.mark.parametrize("table", TABLES)
def test_empty_cells_stay_unknown(table: str) -> None:
    """A number of a table is NaN exactly where its cell is empty."""
    found, rows = catalog.table(table), published(table)
    assert len(found) == len(rows)
    for column in rows[0]:
        values = found[to_si(column)[0]]
        if values.dtype.kind == "f":
            assert np.isnan(values).tolist() == [row[column] == "" for row in rows]


def test_unknown_facts_of_machines() -> None:
    """What nobody published about a machine is NaN in its spec, however many machines know it."""
    fields = {"clock_mhz": "clock_hz", "l2_mib": "l2_bytes", "hbm_tb_per_s": "hbm_bytes_per_s"}
    of_link = {
        "store_gb_per_s_measured": "egress_bytes_per_s",
        "store_gb_per_s_low": "egress_low_bytes_per_s",
        "per_sm_gb_per_s": "per_sm_bytes_per_s",
        "path_capacity_mib": "path_capacity_bytes",
    }
    unknown = 0
    for row in published("machines"):
        spec = catalog.machine(row["machine"])
        for part, names in ((spec, fields), (spec.link, of_link)):
            for column, field in names.items():
                assert math.isnan(getattr(part, field)) == (row[column] == "")
                unknown += row[column] == ""
        assert math.isnan(spec.link.ingress_bytes_per_s)
        assert math.isnan(spec.link.issue_latency_s)
    assert unknown > 10


def test_every_row_has_a_source() -> None:
    """No figure in the data folder comes from nowhere."""
    assert len(TABLES) >= 13
    for table in TABLES:
        assert all(row["source"].strip() for row in published(table)), table


def test_tables_agree_with_each_other() -> None:
    """Figures that stand in two tables, or follow from others in theirs, agree."""
    paths = catalog.table("store_paths")
    for row in paths[paths["path"] == "register store"]:
        link = catalog.machine(row["machine"]).link
        assert link.per_sm_bytes_per_s == pytest.approx(row["per_sm_bytes_per_s"], rel=1e-3)
        assert (
            link.egress_low_bytes_per_s <= row["bytes_per_s"] <= link.egress_high_bytes_per_s
        ), row["machine"]
    gemm = catalog.table("pk_gemm_rs")
    exposed = 1 - gemm["gemm_s"] / gemm["gemm_rs_fused_s"]
    np.testing.assert_allclose(exposed, gemm["non_overlapped_reported_ratio"], atol=0.01)
    stall = catalog.table("xstage_moe_stall")
    predicted = np.maximum(stall["span_wave_s"] - stall["t_mma_linear2_s"], 0.0)
    np.testing.assert_allclose(predicted, stall["stall_predicted_s"], atol=0.02e-6)
    lag = catalog.table("h100_wave_lag")
    np.testing.assert_allclose(lag["wave_s"] / lag["lag_s"], lag["speedup_reported"], atol=0.011)
    a2a = catalog.table("xstage_fa3_a2a")
    hidden = (a2a["serial_s"] - a2a["fused_s"]) / (a2a["serial_s"] - a2a["fa3_only_s"])
    np.testing.assert_allclose(hidden[:-1], a2a["hidden_reported_ratio"][:-1], atol=0.015)
    assert hidden[-1] > 1
    models = {row["model"]: row for row in catalog.table("moe_models")}
    for row in catalog.table("megamoe_pr316"):
        model = models[row["model"]]
        flop = 6 * row["tokens_per_rank"] * model["top_k"] * model["hidden"]
        rate = flop * model["moe_intermediate"] / row["time_s"]
        assert rate == pytest.approx(row["flop_per_s"], rel=0.005, abs=0.5e12)


@pytest.mark.parametrize("name", MEASURED)
def test_assumptions_are_named(name: str) -> None:
    """Assumptions fill the unknowns of the store path, name each, and touch nothing else."""
    known, full = catalog.machine(name), catalog.with_assumptions(catalog.machine(name))
    needed = {q for q in QUANTITIES if "low" not in q and "high" not in q and "vendor" not in q}
    for field in needed:
        before, after = getattr(known.link, field), getattr(full.link, field)
        assert math.isfinite(after), field
        assert math.isnan(before) or after == before
        assert (field in full.link.assumed) == (
            math.isnan(before) or field in known.link.assumed
        ), field
    assert dataclasses.replace(full, link=known.link) == known
    assert full.link.source == known.link.source


def test_assumed_rates() -> None:
    """A range without a figure gives its middle, and what is no store rate is not called one."""
    h200 = catalog.with_assumptions(catalog.machine("H200-SXM")).link
    assert h200.egress_bytes_per_s == pytest.approx(0.5 * (323e9 + 371e9))
    assert h200.per_sm_bytes_per_s == pytest.approx(h200.egress_bytes_per_s / 24)
    assert "egress_bytes_per_s" in h200.assumed
    assert "egress_bytes_per_s" in catalog.machine("MI300X").link.assumed
    assert "egress_bytes_per_s" not in catalog.machine("H100-SXM").link.assumed


def test_vendor_rates_are_assumed() -> None:
    """A matrix rate is what was measured, or else the vendor's claim and named as assumed."""
    assert catalog.machine("H100-SXM").assumed == frozenset()
    h20 = catalog.machine("H20")
    assert h20.bf16_flop_per_s == 148e12
    assert h20.assumed == {"bf16_flop_per_s", "fp8_flop_per_s"}
    assert math.isnan(catalog.machine("RTX-PRO-5000").bf16_flop_per_s)
    assert catalog.machine("RTX-PRO-5000").assumed == frozenset()


def test_machine_without_any_rate_is_refused() -> None:
    """A machine of which nobody knows a drain rate is refused until one is entered."""
    machine = catalog.machine("MI355X")
    with pytest.raises(UnknownFact, match=r"drain rate.*MI355X.*--drain-bytes-per-s"):
        catalog.with_assumptions(machine)
    entered = dataclasses.replace(machine, link=machine.link.replace(egress_bytes_per_s=4e11))
    assert catalog.with_assumptions(entered).link.ingress_bytes_per_s == 4e11


def test_unknown_names_are_answered_with_near_ones() -> None:
    """A name that is in no table is refused with the nearest that is."""
    with pytest.raises(UnknownName, match="did you mean B200-SXM"):
        catalog.machine("B200SXM")
    with pytest.raises(UnknownName, match="did you mean PCIe-Gen5-x16"):
        catalog.link("PCIe-Gen5")
    with pytest.raises(UnknownName, match="did you mean sm_sweeps"):
        catalog.table("sm_sweep")


def test_links() -> None:
    """Host links and the links of the machines are found by name, with their ranges."""
    pcie = catalog.link("PCIe-Gen4-x16")
    assert (pcie.vendor_bytes_per_s, pcie.egress_bytes_per_s) == (32e9, 26.3e9)
    assert (pcie.egress_low_bytes_per_s, pcie.topology) == (22e9, "host bridge")
    assert catalog.link("NVLink5") == catalog.machine("B200-SXM").link


def test_another_link_keeps_the_sm() -> None:
    """On another link a machine issues as fast per SM as before, at the other link's rate."""
    h100 = catalog.machine("H100-SXM")
    moved = catalog.with_link(h100, catalog.link("PCIe-Gen5-x16"))
    assert moved.link.egress_bytes_per_s == 52.8e9
    assert moved.link.per_sm_bytes_per_s == h100.link.per_sm_bytes_per_s
    assert moved.link.assumed == frozenset()
    full = catalog.with_assumptions(moved)
    assert full.link.egress_bytes_per_s == 52.8e9
    again = catalog.with_link(catalog.with_assumptions(catalog.machine("A100-SXM")), moved.link)
    assert again.link.per_sm_bytes_per_s == moved.link.per_sm_bytes_per_s
    assert again.link.assumed == {"issue_latency_s", "per_sm_capacity_bytes"}


def test_flags() -> None:
    """A rate above the marketed one is flagged in words, and none of the published is."""
    assert [flag for m in catalog.machines().values() for flag in catalog.flags(m)] == []
    h100 = catalog.machine("H100-SXM")
    fast = dataclasses.replace(h100, link=h100.link.replace(egress_bytes_per_s=5e11))
    (flag,) = catalog.flags(fast)
    assert all(word in flag for word in ("H100-SXM", "500 GB/s", "450 GB/s", "NVLink4"))


@pytest.mark.parametrize(
    ("vendor", "rate", "words"),
    [
        (200e9, 160e9, ("160 GB/s to 164 GB/s", "200 GB/s", "80%", "not a fault")),
        (300e9, 230e9, ("240 GB/s", "300 GB/s", "77%", "not a fault")),
        (300e9, 150e9, ("50%", "below that ceiling")),
        (300e9, 290e9, ("97%", "above that ceiling")),
        (300e9, math.nan, ("240 GB/s",)),
        (math.nan, 100e9, ("not known",)),
    ],
)
def test_ceiling(vendor: float, rate: float, words: tuple[str, ...]) -> None:
    """What stores can reach on a link is said beside its marketed rate, and is no fault."""
    said = catalog.ceiling(LinkSpec(name="L", vendor_bytes_per_s=vendor, egress_bytes_per_s=rate))
    assert all(word in said for word in words), said


def write(folder: Path, text: str, name: str = "mine.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_user_machine(tmp_path: Path) -> None:
    """A user's machine is read in any unit of a quantity, and what is left out is not known."""
    path = write(
        tmp_path,
        "\ufeffmachine, sms, max_gpus, store_tb_per_s_measured, measured_by, issue_latency_us,"
        " assumed\n\nmine, 132, 4, 0.34, me, 0.5, issue_latency_us\n"
        '"other, old", 80, 8, , , ,\n',
    )
    with pytest.raises(UnknownName, match="Known: mine, other, old"):
        catalog.machine(str(path))
    mine = catalog.machine(f"{path}:mine")
    assert (mine.name, mine.n_sms, mine.max_gpus, type(mine.n_sms)) == ("mine", 132, 4, int)
    assert mine.link.egress_bytes_per_s == pytest.approx(340e9)
    assert (mine.link.source, mine.link.issue_latency_s) == ("me", 5e-7)
    assert mine.link.assumed == {"issue_latency_s"}
    assert math.isnan(mine.clock_hz)
    assert math.isnan(catalog.machine(f"{path}:other, old").link.egress_bytes_per_s)


def test_example_file_works() -> None:
    """The example for users' own files describes a machine that can be simulated at once."""
    example = catalog.machine(str(data_folder() / "machines_example.csv"))
    full = catalog.with_assumptions(example)
    assert full.link.per_sm_bytes_per_s == 20e9
    assert {"path_capacity_bytes", "issue_latency_s"} <= example.link.assumed
    assert catalog.flags(example) == []


def test_user_link(tmp_path: Path) -> None:
    """A user's link file gives links, and is no machine file."""
    text = "link,topology,gb_per_s_vendor,store_gb_per_s_measured\nfabric,full mesh,100,80\n"
    path = write(tmp_path, text)
    link = catalog.link(str(path))
    assert (link.name, link.topology, link.egress_bytes_per_s) == ("fabric", "full mesh", 80e9)
    with pytest.raises(FileRejected, match=r"mine\.csv.*links, not machines"):
        catalog.machine(str(path))
    example = data_folder() / "machines_example.csv"
    assert catalog.link(f"{example}:my-node").name == "NVLink4"


HEAD = "machine,sms,max_gpus,store_gb_per_s_measured"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["no rows"]),
        (HEAD, ["no rows"]),
        ("gpu,sms\na,1", ["row 1", "'gpu'", "unknown column"]),
        (f"{HEAD},clok_mhz\na,1,1,1,1", ["row 1", "'clok_mhz'", "did you mean clock_mhz"]),
        (f"{HEAD},clock\na,1,1,1,1", ["row 1", "'clock'", "no unit", "clock_mhz"]),
        (f"{HEAD},l2\na,1,1,1,1", ["row 1", "'l2'", "no unit", "l2_mib"]),
        ("machine,sms,max_gpus,store_measured\na,1,1,1",
         ["row 1", "'store_measured'", "no unit", "store_gb_per_s_measured"]),
        (f"{HEAD},clock_gb_per_s\na,1,1,1,1", ["row 1", "'clock_gb_per_s'", "unknown column"]),
        (f"{HEAD},sms\na,1,1,1,1", ["row 1", "'sms'", "earlier column"]),
        (f"{HEAD},store_tb_per_s_measured\na,1,1,1,1",
         ["row 1", "'store_tb_per_s_measured'", "earlier column"]),
        (f"{HEAD}\na,1,1", ["row 2", "3 cells", "4 columns"]),
        (f"{HEAD}\na,1,1,1,000", ["row 2", "5 cells", "double quotes"]),
        (f"{HEAD}\na,1,1,0", ["row 2", "'store_gb_per_s_measured'", "above 0", "B/s", "empty"]),
        (f"{HEAD}\na,1,1,-3", ["row 2", "'store_gb_per_s_measured'", "above 0"]),
        (f"{HEAD}\na,1,1,fast", ["row 2", "'store_gb_per_s_measured'", "'fast'", "not a number"]),
        (f"{HEAD}\na,1,1,nan", ["row 2", "'store_gb_per_s_measured'", "not a number"]),
        (f"{HEAD}\na,1,1,1e999", ["row 2", "'store_gb_per_s_measured'", "not a number"]),
        (f"{HEAD}\na,,1,1", ["row 2", "'sms'", "missing or empty"]),
        ("machine,max_gpus\na,8", ["row 2", "'sms'", "missing or empty"]),
        (f"{HEAD}\na,1,,1", ["row 2", "'max_gpus'", "missing or empty"]),
        (f"{HEAD}\n,1,1,1", ["row 2", "'machine'", "missing or empty"]),
        (f"{HEAD}\na,0,1,1", ["row 2", "'sms'", "n_sms = 0", "from 1"]),
        (f"{HEAD}\na,1.5,1,1", ["row 2", "'sms'", "n_sms = 1.5", "whole"]),
        (f"{HEAD}\na,1,1e9,1", ["row 2", "'max_gpus'", "100000"]),
        (f"{HEAD}\na,1,1,1\nb,1,1,1\na,1,1,1", ["row 4", "'machine'", "'a'", "earlier row"]),
        (f"{HEAD},topology\na,1,1,1,ring", ["row 2", "'topology'", "ring", "full mesh"]),
        (f"{HEAD},l2_mib\na,1,1,1,0", ["row 2", "'l2_mib'", "above 0"]),
        (f"{HEAD},bf16_tflops_measured,bf16_tflops_vendor\na,1,1,1,1,much",
         ["row 2", "'bf16_tflops_vendor'", "'much'"]),
        (f"{HEAD},assumed\na,1,1,1,l2_mib", ["row 2", "'assumed'", "'l2_mib'"]),
        (f"{HEAD},store_gb_per_s_low,store_gb_per_s_high\na,1,1,,5,4",
         ["row 2", "'store_gb_per_s_low'"]),
        (f"{HEAD},store_gb_per_s_low\na,1,1,3,4", ["row 2", "'store_gb_per_s_low'"]),
        (f"{HEAD},store_gb_per_s_high\na,1,1,5,4", ["row 2", "'store_gb_per_s_high'"]),
        ("link,gb_per_s_vendor\n,5", ["row 2", "'link'", "missing or empty"]),
        ("link,sms\na,5", ["row 1", "'sms'", "unknown column"]),
        (f'{HEAD}\n"a,1,1,1', ["CSV"]),
    ],
)  # fmt: skip
def test_bad_user_file(tmp_path: Path, text: str, words: list[str]) -> None:
    """A file with a fault is refused, naming the file, the row, the column and the reason."""
    path = write(tmp_path, text)
    with pytest.raises(FileRejected) as caught:
        catalog.load_user_file(path)
    assert all(word in str(caught.value) for word in [str(path), *words]), caught.value


def test_unreadable_user_file(tmp_path: Path) -> None:
    """A file that is missing, a folder, or no text is refused, naming it."""
    binary = tmp_path / "b.csv"
    binary.write_bytes(b"machine,sms\n\xff\xfe\x00,1\n")
    folder = tmp_path / "d.csv"
    folder.mkdir()
    for path in (tmp_path / "none.csv", binary, folder):
        with pytest.raises(FileRejected, match=path.name):
            catalog.machine(str(path))


CELLS = st.one_of(
    st.floats().map(str), st.integers().map(str), st.text(max_size=12), st.just(""),
    st.sampled_from(["1", "switch", "2e3", "store_gb_per_s_measured", "-0", "١٢"]),
)  # fmt: skip


@given(data=st.data(), columns=st.sampled_from([MACHINE_COLUMNS, LINK_COLUMNS]))
def test_any_cell_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, columns: tuple[str, ...]
) -> None:
    """Whatever stands in the cells of a file, it gives valid specs or is refused by its name."""
    chosen = [columns[0], *data.draw(st.lists(st.sampled_from(columns[1:]), unique=True))]
    path = tmp_path_factory.mktemp("any") / "any.csv"
    with path.open("w", newline="", encoding="utf-8", errors="replace") as stream:
        csv.writer(stream).writerows([chosen, [data.draw(CELLS) for _ in chosen]])
    found: dict[str, MachineSpec | LinkSpec] = {}
    refusal = ""
    try:
        found = catalog.load_user_file(path)
    except FileRejected as error:
        refusal = str(error)
    assert bool(found) != (str(path) in refusal)
    for spec in found.values():
        link = spec.link if isinstance(spec, MachineSpec) else spec
        assert not link.egress_bytes_per_s <= 0
