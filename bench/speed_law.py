"""How long the law takes to predict a whole map of tilings, and a single configuration."""

from __future__ import annotations

from functools import partial

import numpy as np

from bench.figures import Figure, print_table
from bench.timing import best_of
from xstage_lab.analysis import predict, predict_map, published
from xstage_lab.catalog import machine, with_assumptions
from xstage_lab.spec import BurstTrain, FusedGemm, Tuning

DESTINATIONS = ("round-robin", "row-owner", "row-owner-unrotated", "hot:0.4")
MAP_ASKED_S = 0.010


def measure() -> list[Figure]:
    """Time a 64 x 64 map and one prediction for all kinds of destinations."""
    b200 = with_assumptions(machine("B200-SXM"))
    calibration = published(b200)
    tile_m, tile_n = np.meshgrid(8 * np.arange(1, 65), 8 * np.arange(1, 65))
    maps, rows = {}, []
    for destinations in DESTINATIONS:
        gemm = FusedGemm(m=8192, n=8192, k=4096, destinations=destinations)
        each = best_of(partial(predict_map, gemm, b200, calibration, tile_m, tile_n, 2))
        one = best_of(partial(predict, gemm, b200, calibration, Tuning()))
        maps[destinations] = each.wall_s
        rows.append((f"fused GEMM, {destinations}", f"{each.wall_s * 1e3:.2f} ms",
                     f"{each.cpu_s * 1e3:.2f} ms", f"{one.wall_s * 1e3:.3f} ms"))
    train = BurstTrain(n_producers=148, burst_bytes=32768, gap_s=3e-6)
    one = best_of(partial(predict, train, b200, calibration))
    rows.append(("burst train", "", "", f"{one.wall_s * 1e3:.3f} ms"))
    print_table(("", "64 x 64 map", "its CPU time", "one prediction"), rows)
    return [
        Figure(what=f"64 x 64 map of the law, {destinations}", value=seconds * 1e3,
               asked=MAP_ASKED_S * 1e3, unit="ms")
        for destinations, seconds in maps.items()
    ]
