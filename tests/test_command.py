"""The command line as a script uses it: one object on request, one line for what is wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from xstage_lab.__main__ import main
from xstage_lab.record import SUMMARY_KEYS, Record

BURST = ("--workload", "burst", "--producers", "32", "--bytes", "8192", "--bursts", "20")
GEMM = ("--workload", "fused-gemm", "--m", "2048", "--n", "2048", "--k", "512")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one line an impossible command ends with."""
    assert main(list(arguments)) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert "Traceback" not in told.err
    return told.err


@pytest.mark.parametrize("workload", [BURST, GEMM], ids=["burst", "fused-gemm"])
def test_compare_prints_prediction_beside_measurement(
    capsys: pytest.CaptureFixture[str], workload: tuple[str, ...]
) -> None:
    """Compare prints both sides over the same keys, their error, the regime and the badges."""
    found = printed(capsys, "compare", *workload)
    for key in ("predicted", "measured", "error_ratio"):
        assert set(SUMMARY_KEYS) <= set(found[key])
    for key in ("total_s", "accepted_s"):
        error = found["predicted"][key] / found["measured"][key] - 1
        assert found["error_ratio"][key] == pytest.approx(error)
    assert found["provenance"]["predicted"]["badge"] == "PREDICTED"
    assert found["provenance"]["measured"]["badge"] == "SIMULATED"
    assert found["regime"].endswith("-bound")
    assert len(found["explain"]) >= 2


def test_predict_and_measure_print_the_parts_they_have(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Predict prints what compare prints without the measurement, and measure without the law."""
    whole = printed(capsys, "compare", *GEMM)
    predicted = printed(capsys, "predict", *GEMM)
    measured = printed(capsys, "measure", *GEMM)
    assert set(predicted) <= set(whole)
    assert not {"measured", "error_ratio"} & set(predicted)
    assert set(predicted["predicted"]) == set(whole["predicted"])
    assert measured["measured"] == whole["measured"]  # same seed, same device
    assert "predicted" not in measured


def test_calibrate_prints_each_parameter_with_its_place(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Calibrate prints t0, r_SM, R and Q, and the K and B they hold for."""
    found = printed(capsys, "calibrate", "--producers", "32")
    assert (found["n_producers"], found["burst_bytes"]) == (32, 32768)
    free = found["issue_latency_s"] + found["burst_bytes"] / found["per_sm_bytes_per_s"]
    assert found["issue_free_s"] == pytest.approx(free)
    assert found["drain_bytes_per_s"] == pytest.approx(717e9, rel=0.02)
    assert math.isfinite(found["capacity_bytes"])


def test_a_stored_calibration_is_used(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A calibration file predicts as it was saved, on its own machine and no other."""
    file = str(tmp_path / "b200.json")
    assert main(["calibrate", "--producers", "32", "--out", file]) == 0
    capsys.readouterr()
    found = printed(capsys, "predict", *BURST, "--calibration", file)
    assert "simulated B200-SXM" in found["provenance"]["calibration"]
    told = refused(capsys, "predict", *BURST, "--machine", "H100-SXM", "--calibration", file)
    assert "B200-SXM" in told
    assert "H100-SXM" in told


def test_supplied_parameters_are_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    """A parameter given on the command line decides, and is named as nobody's measurement."""
    found = printed(capsys, "predict", *BURST, "--bursts", "500", "--gap", "0",
                    "--drain-bytes-per-s", "1e11")
    assert found["predicted"]["period_s"] == pytest.approx(32 * 8192 / 1e11)
    assert "drain_bytes_per_s" in found["provenance"]["assumed"]


def test_a_saved_record_replays(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What measure saves, the recorded device gives back, and what was simulated still says so."""
    first = printed(capsys, "measure", *GEMM, "--out", str(tmp_path))
    assert Record.load(tmp_path / "record.npz").summary["total_s"] == first["measured"]["total_s"]
    again = printed(capsys, "measure", *GEMM, "--device", f"recorded:{tmp_path}")
    assert again["measured"] == first["measured"]
    assert again["provenance"]["badge"] == "SIMULATED"


def test_a_rate_above_the_marketed_one_is_flagged(capsys: pytest.CaptureFixture[str]) -> None:
    """A drain rate that the link is not even marketed with is told."""
    found = printed(capsys, "predict", *BURST, "--drain-bytes-per-s", "950e9")
    assert any("marketed" in line for line in found["explain"])


@pytest.mark.parametrize(("arguments", "said"), [
    (("--m", "0"), ("m = 0", "1 to")),
    (("--m", "-3"), ("m = -3", "1 to")),
    (("--n", "nan"), ("n = nan",)),
    (("--k", "many"), ("k = 'many'", "whole numbers")),
    (("--depth", "0"), ("issue_depth = 0", "1 to")),
    (("--tile", "128"), ("tile = '128'", "MxNxK")),
    (("--tile", "256x256x64"), ("256x256x64", "KiB", "227")),
    (("--gpus", "0"), ("n_gpus = 0", "1 to")),
    (("--gpus", "9"), ("n_gpus = 9", "1 to 8")),
    (("--gpus", "1e30"), ("n_gpus",)),
    (("--destinations", "hot:2"), ("hot:2", "0 to 1")),
    (("--destinations", "everywhere"), ("everywhere", "round-robin")),
    (("--out-dtype", "fp64"), ("fp64", "fp32")),
    (("--machine", "B200"), ("B200-SXM",)),
    (("--machine", "MI355X"), ("drain rate", "--drain-bytes-per-s")),
    (("--machine", "no/such.csv"), ("no/such.csv",)),
    (("--link", "NVLink"), ("NVLink", "PCIe")),
    (("--device", "simulate"), ("simulate", "simulated")),
    (("--device", "recorded"), ("recorded:FOLDER",)),
    (("--calibration", "no/such.json"), ("no/such.json",)),
    (("--workload", "gemm"), ("fused-gemm",)),
    (("--seed", "x"), ("seed = 'x'",)),
    (("--drain-bytes-per-s", "0"), ("drain_bytes_per_s = 0", "B/s", "above 0")),
    (("--capacity-bytes", "-1"), ("capacity_bytes = -1", " B")),
    (("--workload", "burst", "--gap", "-1e-6"), ("gap_s = -1e-06 s", "from 0")),
    (("--workload", "burst", "--gap", "inf"), ("gap_s = inf",)),
    (("--workload", "burst", "--producers", "149"), ("n_producers = 149", "1 to 148", "SMs")),
    (("--workload", "burst", "--sync", "lock"), ("lock", "lockstep")),
], ids=lambda value: " ".join(value) if isinstance(value, tuple) else "")
def test_impossible_options_end_with_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: tuple[str, ...]
) -> None:
    """Whatever cannot be ends with status 2 and one line naming field, value, range and remedy."""
    told = refused(capsys, "compare", *arguments)
    for words in said:
        assert words in told


def test_one_gpu_has_nothing_remote(capsys: pytest.CaptureFixture[str]) -> None:
    """One GPU is valid: it stores to itself and is as fast fused as not."""
    found = printed(capsys, "compare", *GEMM, "--gpus", "1")
    assert abs(found["error_ratio"]["total_s"]) < 0.01
    assert found["unfused"]["copy_s"] == 0
