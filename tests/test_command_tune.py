"""The verb `tune` as a script uses it: the best of a workload as one object or a table."""

from __future__ import annotations

import argparse
import json

import pytest
from test_command import printed, refused

from xstage_lab import catalog, command_tune
from xstage_lab.__main__ import main
from xstage_lab.devices.base import Device
from xstage_lab.devices.simulated import SimulatedDevice
from xstage_lab.errors import InvalidValue
from xstage_lab.spec import MachineSpec

SMALL = {
    "fused-gemm": ("--m", "1024", "--n", "1280", "--k", "512"),
    "moe": ("--workload", "moe", "--model", "DSv4-Flash", "--tokens", "64", "--tile",
            "64x256x64"),
    "ulysses": ("--workload", "ulysses", "--model", "FLUX.1-1024"),
}


@pytest.mark.parametrize("workload", SMALL)
def test_tune_finds_and_explains_a_best(
    capsys: pytest.CaptureFixture[str], workload: str
) -> None:
    """Each workload gets a best, a runner-up, their margin, and words on whether to fuse."""
    found = printed(capsys, "tune", *SMALL[workload], "--budget", "5")
    assert found["best"]["badge"] == "SIMULATED"
    assert found["n_measured"] <= 5 < found["n_candidates"]
    assert found["runner_up"] is not None
    assert "us fused against" in found["fuse"]
    assert len(found["explain"]) >= 4
    assert {"predicted", "measured"} == set(found["provenance"])


def test_a_table_and_progress(capsys: pytest.CaptureFixture[str]) -> None:
    """Without --json a table and sentences go to stdout, progress to stderr."""
    assert main(["tune", *SMALL["fused-gemm"], "--budget", "4"]) == 0
    told = capsys.readouterr()
    for words in ("best", "runner-up", "PREDICTED", "SIMULATED", "compute-then-copy"):
        assert words in told.out
    assert "100%" in told.err


def test_the_law_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """With a budget of 0 nothing is measured, and the answer says that it is predicted."""
    found = printed(capsys, "tune", *SMALL["fused-gemm"], "--budget", "0")
    assert found["badges"][0] == found["best"]["badge"] == "PREDICTED"
    assert found["best"]["measured_s"] is None
    assert "measured" not in found["provenance"]


def test_what_is_given_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """Tile, depth, order, SMs and shared memory that were asked for are not searched over."""
    found = printed(capsys, "tune", *SMALL["moe"], "--order", "wave", "--depth", "2", "--max-sms",
                    "100", "--budget", "0")
    best = found["best"]["parameters"]
    assert found["n_candidates"] == 1
    assert (best["tile_m"], best["tile_n"], best["issue_depth"], best["order"], best["n_ctas"]) == (
        64, 256, 2, "wave", 100)
    less = printed(capsys, "tune", *SMALL["fused-gemm"], "--smem-bytes", "60000", "--budget", "0")
    more = printed(capsys, "tune", *SMALL["fused-gemm"], "--budget", "0")
    assert less["n_candidates"] < more["n_candidates"]
    counts = printed(capsys, "tune", *SMALL["fused-gemm"], "--gpu-counts", "2,4", "--budget", "0")
    assert counts["n_candidates"] == 2 * more["n_candidates"]


def test_a_second_search_measures_nothing_again(capsys: pytest.CaptureFixture[str]) -> None:
    """Points of the run log are not measured again, and the answer is the same."""
    arguments = ("tune", *SMALL["fused-gemm"], "--k", "768", "--budget", "4")
    first = printed(capsys, *arguments)
    assert main(list(arguments)) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "tile" in line]
    assert lines
    assert all("from the run log" in line for line in lines)
    assert json.dumps(printed(capsys, *arguments)["best"]) == json.dumps(first["best"])


@pytest.mark.parametrize("bulk", [True, False])
def test_store_paths_of_kernels_are_compared(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, bulk: bool
) -> None:
    """On GPUs both store paths are calibrated and searched, one where the GPU has no other."""
    machine = catalog.with_assumptions(catalog.machine("H100-SXM"))
    asked: list[str] = []

    def device_of(options: argparse.Namespace, machine: MachineSpec) -> Device:
        asked.append(options.store_path)
        if options.store_path == "bulk" and not bulk:
            raise InvalidValue("store_path", "bulk", "registers")
        return SimulatedDevice(machine)

    monkeypatch.setattr(command_tune, "device_of", device_of)
    monkeypatch.setattr(command_tune, "device_name", lambda _: ("cuda", ""))
    monkeypatch.setattr(command_tune, "machine_of", lambda _: machine)
    found = printed(capsys, "tune", *SMALL["fused-gemm"], "--depth", "2", "--budget", "3")
    one = printed(capsys, "tune", *SMALL["fused-gemm"], "--depth", "2", "--budget", "3",
                  "--store-path", "registers")
    assert asked == ["registers", "bulk", "registers"]
    assert found["n_candidates"] == (2 if bulk else 1) * one["n_candidates"]
    assert found["best"]["store_path"] in command_tune.STORE_PATHS


@pytest.mark.parametrize(("arguments", "said"), [
    (("--budget", "-1"), ("budget = -1", "from 0")),
    (("--budget", "many"), ("budget = 'many'", "whole numbers")),
    (("--max-sms", "0"), ("max_sms = 0", "from 1")),
    (("--smem-bytes", "1.5"), ("smem_bytes = 1.5", "whole numbers")),
    (("--gpu-counts", "2;4"), ("gpu_counts = '2;4'", "2,4,8")),
    (("--gpu-counts", "9", "--budget", "0"), ("n_gpus = 9", "1 to 8")),
    (("--smem-bytes", "1024", "--budget", "0"), ("1 KiB of shared memory", "smaller tiles")),
    (("--tile", "512x512x64", "--budget", "0"), ("227 KiB of shared memory", "smaller tiles")),
    (("--workload", "burst", "--budget", "0"), ("no tiles to tune",)),
    (("--order", "wave"), ("--order", "moe")),
], ids=lambda value: " ".join(value) if isinstance(value, tuple) else "")
def test_impossible_searches_end_with_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: tuple[str, ...]
) -> None:
    """Whatever cannot be ends with status 2 and one line that says why and the way out."""
    told = refused(capsys, "tune", *arguments)
    for words in said:
        assert words in told
