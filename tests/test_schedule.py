"""Tile programs: everything is computed and stored once, by the right GPU, to the right one."""

from __future__ import annotations

import contextlib
import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import burst_trains, gemms, machine_of, tunings

from xstage_lab.errors import Infeasible, InvalidValue, UnknownName
from xstage_lab.record import to_plain
from xstage_lab.schedule import (
    BURST,
    COPY,
    GEMM_TILE,
    LINEAR_1,
    LINEAR_2,
    QUERY_TILE,
    Program,
    Tasks,
    build,
)
from xstage_lab.spec import BurstTrain, FusedGemm, MoELayer, Tuning, UlyssesAttention

MACHINE = machine_of(n_sms=24)
TILE_FIELDS = ["m0", "n0", "m", "n", "k", "flop", "store_bytes", "panel", "panel_bytes"]


def gemm_program(destinations: str, rows: int = 16, cols: int = 3, n_gpus: int = 4) -> Program:
    """Build a program of rows x cols tiles of 64 x 64."""
    gemm = FusedGemm(m=64 * rows, n=64 * cols, k=32, n_gpus=n_gpus, destinations=destinations)
    return build(gemm, MACHINE, Tuning(tile_m=64, tile_n=64))


@given(gemm=gemms(), tuning=tunings(max_ctas=24))
def test_bytes_and_flops_add_up(gemm: FusedGemm, tuning: Tuning) -> None:
    """On every GPU the tiles' bytes and FLOPs are exactly those of the GEMM, edges included."""
    program = build(gemm, MACHINE, tuning)
    assert program.n_gpus == gemm.n_gpus
    for gpu, tasks in enumerate(program.tasks):
        assert tasks["store_bytes"].sum() == gemm.store_bytes
        assert tasks["flop"].sum() == gemm.flop
        to_each = [tasks["store_bytes"][tasks["owner"] == g].sum() for g in range(gemm.n_gpus)]
        assert sum(to_each) == gemm.store_bytes  # every destination takes part in the program
        assert program.remote_bytes(gpu) == gemm.store_bytes - to_each[gpu]
    assert set(tasks["kind"]) == {GEMM_TILE}


@given(gemm=gemms(max_gpus=3, max_edge=300), tuning=tunings())
def test_tiles_cover_the_output_once(gemm: FusedGemm, tuning: Tuning) -> None:
    """Every element of every GPU's output belongs to exactly one tile, which is not too large."""
    for tasks in build(gemm, MACHINE, tuning).tasks:
        painted = np.zeros((gemm.m, gemm.n), int)
        for tile in tasks:
            m0, n0, m, n = (int(tile[name]) for name in ("m0", "n0", "m", "n"))
            assert 0 < m <= tuning.tile_m
            assert 0 < n <= tuning.tile_n
            painted[m0:m0 + m, n0:n0 + n] += 1
        assert (painted == 1).all()


@given(gemm=gemms(), tuning=tunings())
def test_a_column_of_tiles_reads_one_weight_panel(gemm: FusedGemm, tuning: Tuning) -> None:
    """Tiles of a column share a weight panel, and the panels are k x n operands in all."""
    tasks = build(gemm, MACHINE, tuning).tasks[0]
    _, first = np.unique(tasks["panel"], return_index=True)
    element = {"bf16": 2, "fp8": 1}[gemm.dtype]
    assert tasks["panel_bytes"][first].sum() == gemm.n * gemm.k * element
    assert (tasks["panel"] == tasks["n0"] // tuning.tile_n).all()


@given(gemm=gemms(), tuning=tunings(), other=gemms())
def test_destinations_permute_and_change_nothing_else(
    gemm: FusedGemm, tuning: Tuning, other: FusedGemm
) -> None:
    """Who gets the tiles decides their owners and order; the tiles themselves stay the same."""
    def tiles(destinations: str) -> list[Tasks]:
        program = build(dataclasses.replace(gemm, destinations=destinations), MACHINE, tuning)
        return [np.sort(t[TILE_FIELDS].astype(t[TILE_FIELDS].dtype), order=["m0", "n0"])
                for t in program.tasks]

    ours, theirs = tiles(gemm.destinations), tiles(other.destinations)
    assert all((a == theirs[0]).all() for a in [*ours, *theirs])


def test_round_robin_owners() -> None:
    """Tile i of every GPU belongs to GPU i mod P."""
    for tasks in gemm_program("round-robin").tasks:
        assert (tasks["owner"] == np.arange(tasks.size) % 4).all()


@given(rows=st.integers(1, 40), n_gpus=st.integers(1, 8))
def test_row_owners_are_contiguous_and_even(rows: int, n_gpus: int) -> None:
    """Owners hold contiguous rows of tiles, whose numbers differ by one at most."""
    tasks = gemm_program("row-owner-unrotated", rows, 2, n_gpus).tasks[0]
    by_row = tasks["owner"].reshape(rows, 2)
    assert (by_row[:, 0] == by_row[:, 1]).all()
    assert (np.diff(by_row[:, 0]) >= 0).all()
    share = np.bincount(by_row[:, 0], minlength=n_gpus)
    assert share.size == n_gpus
    assert share.max() - share.min() <= 1


def test_row_owner_starts_at_its_successor() -> None:
    """Every GPU begins with its successor's rows and goes round; its own rows come last."""
    plain = gemm_program("row-owner-unrotated").tasks
    for gpu, tasks in enumerate(gemm_program("row-owner").tasks):
        owners = tasks["owner"][np.sort(np.unique(tasks["owner"], return_index=True)[1])]
        assert owners.tolist() == [(gpu + 1 + i) % 4 for i in range(4)]
        assert (np.roll(tasks, 12 * (gpu + 1)) == plain[gpu]).all()


def test_unrotated_owners_coincide() -> None:
    """Without rotation all GPUs address the same owner with the same tile."""
    plain = gemm_program("row-owner-unrotated").tasks
    assert all((tasks["owner"] == plain[0]["owner"]).all() for tasks in plain)
    rotated = gemm_program("row-owner").tasks
    together = np.stack([tasks["owner"] for tasks in rotated])
    assert (np.sort(together, axis=0) == np.arange(4)[:, None]).all()  # never two to one owner


@given(share=st.floats(0, 1), rows=st.integers(1, 40), n_gpus=st.integers(2, 8))
def test_hot_share_is_exact_to_a_tile(share: float, rows: int, n_gpus: int) -> None:
    """At any moment GPU 0 has got its share of the tiles to within one, the others the rest
    evenly."""
    owner = gemm_program(f"hot:{share}", rows, 3, n_gpus).tasks[1]["owner"]
    issued = np.arange(1, owner.size + 1)
    assert (abs(np.cumsum(owner == 0) - share * issued) < 1 + 1e-6).all()
    others = np.bincount(owner[owner > 0], minlength=n_gpus)[1:]
    assert others.size == n_gpus - 1
    assert others.max() - others.min() <= 1


@pytest.mark.parametrize("destinations", ["round-robin", "row-owner", "hot:0.4"])
def test_one_gpu_stores_nothing_remote(destinations: str) -> None:
    """With a single GPU every tile is its own."""
    program = gemm_program(destinations, n_gpus=1)
    assert program.remote_bytes(0) == 0
    assert (program.tasks[0]["owner"] == 0).all()


@given(workload=st.one_of(gemms(), burst_trains()))
def test_controls_change_destinations_or_bytes_only(workload: FusedGemm | BurstTrain) -> None:
    """`local` keeps every store at home, `off` stores nothing; all else is the same program."""
    remote, local, off = (build(workload, MACHINE, stores=how) for how in
                          ("remote", "local", "off"))
    for gpu in range(workload.n_gpus):
        assert local.remote_bytes(gpu) == off.remote_bytes(gpu) == 0
        assert (local.tasks[gpu]["store_bytes"] == remote.tasks[gpu]["store_bytes"]).all()
        assert (off.tasks[gpu]["store_bytes"] == 0).all()
        same = [name for name in remote.tasks[gpu].dtype.names if name not in
                ("owner", "store_bytes")]
        assert (local.tasks[gpu][same] == remote.tasks[gpu][same]).all()
        assert (off.tasks[gpu][same] == remote.tasks[gpu][same]).all()
    with pytest.raises(UnknownName, match="stores"):
        build(workload, MACHINE, stores="elsewhere")


@given(train=burst_trains())
def test_rows_of_a_train(train: BurstTrain) -> None:
    """Row j K + k is burst j of producer k: B bytes to one peer, after a gap but for the first."""
    program = build(train, MACHINE)
    assert (program.n_ctas, program.issue_depth) == (train.n_producers, 1)
    received = np.zeros(train.n_gpus, int)
    for gpu, tasks in enumerate(program.tasks):
        assert set(tasks["kind"]) == {BURST}
        bursts = tasks.reshape(train.n_bursts, train.n_producers)
        assert (bursts["store_bytes"] == train.burst_bytes).all()
        assert (bursts["gap_s"][0] == 0).all()
        assert (bursts["gap_s"][1:] == train.gap_s).all()
        assert (bursts["owner"] == bursts["owner"][0]).all()  # a producer keeps its peer
        assert ((bursts["owner"] == gpu) == (train.n_gpus == 1)).all()
        to_each = np.bincount(tasks["owner"], minlength=train.n_gpus)
        received += to_each
        to_peers = np.delete(to_each, gpu) // train.n_bursts
        assert to_peers.size == 0 or to_peers.max() - to_peers.min() <= 1
    assert (received == train.n_bursts * train.n_producers).all()  # nobody is a hot spot


@given(train=burst_trains())
def test_lockstep_waits_for_all_producers(train: BurstTrain) -> None:
    """In lockstep, burst j waits until all K producers ended burst j - 1; free ones never wait."""
    for tasks in build(train, MACHINE).tasks:
        bursts = tasks.reshape(train.n_bursts, train.n_producers)
        if train.sync == "free":
            assert (bursts["waits_for"] == -1).all()
            assert (bursts["signals"] == -1).all()
            continue
        number = np.arange(train.n_bursts)[:, None]
        assert (bursts["signals"] == number).all()
        assert (bursts["waits_for"] == number - 1).all()
        assert (bursts["wait_count"][1:] == train.n_producers).all()


@given(gemm=gemms(), other=gemms(), tuning=tunings(), stores=st.sampled_from(("off", "local")))
def test_parameters_say_which_program_it_is(
    gemm: FusedGemm, other: FusedGemm, tuning: Tuning, stores: str
) -> None:
    """Programs of different workloads, tunings or controls differ in plain parameters."""
    plain = build(gemm, MACHINE, tuning).parameters()
    assert json.loads(json.dumps(to_plain(plain))) == to_plain(plain)
    assert plain["workload"] == "FusedGemm"
    if other != gemm:
        assert build(other, MACHINE, tuning).parameters() != plain
    deeper = dataclasses.replace(tuning, issue_depth=tuning.issue_depth + 1)
    assert build(gemm, MACHINE, deeper).parameters() != plain
    assert build(gemm, MACHINE, tuning, stores=stores).parameters() != plain


def test_ctas_default_to_all_sms() -> None:
    """A fused kernel takes every SM unless told otherwise."""
    gemm = FusedGemm(m=256, n=256, k=64)
    assert build(gemm, MACHINE).n_ctas == 24
    assert build(gemm, MACHINE, Tuning(n_ctas=5)).n_ctas == 5
    with pytest.raises(InvalidValue, match="n_ctas"):
        build(gemm, MACHINE, Tuning(n_ctas=25))


def test_absurd_sizes_are_refused() -> None:
    """A program with more tiles than any memory holds is refused in words."""
    with pytest.raises(Infeasible, match="tile"):
        build(FusedGemm(m=2**24, n=2**24, k=1), MACHINE, Tuning(tile_m=1, tile_n=1))


def test_owners_of_many_gpus() -> None:
    """However many GPUs a machine may have, every owner is one of them."""
    n_gpus = 40_000
    with contextlib.suppress(InvalidValue):
        train = BurstTrain(n_producers=1, burst_bytes=1, gap_s=0.0, n_bursts=1, n_gpus=n_gpus)
        program = build(train, machine_of(max_gpus=n_gpus))
        assert all(0 <= tasks["owner"][0] < n_gpus for tasks in program.tasks)


moe_layers = st.builds(
    lambda per_gpu, **kw: MoELayer(**kw, experts=per_gpu * kw["n_gpus"]),
    per_gpu=st.integers(2, 5), tokens=st.integers(1, 300), hidden=st.integers(1, 300),
    intermediate=st.integers(1, 200), top_k=st.integers(1, 2), n_gpus=st.integers(1, 4),
    order=st.sampled_from(["wave", "interleaved"]),
    routing=st.sampled_from(["balanced", "zipf:0.7", "zipf:3"]))
attentions = st.builds(
    lambda per_gpu, **kw: UlyssesAttention(**kw, heads=per_gpu * kw["n_gpus"]),
    per_gpu=st.integers(1, 3), sequence=st.integers(4, 700), head_dim=st.sampled_from([64, 128]),
    n_gpus=st.integers(1, 4), causal=st.booleans(), n_comm_sms=st.integers(1, 23),
    mode=st.sampled_from(["fused", "serial", "dedicated"]))
SMALL_TILE = Tuning(tile_m=64, tile_n=64, n_stages=2)


@given(moe=moe_layers)
def test_an_moe_layer_is_computed_and_combined_whole(moe: MoELayer) -> None:
    """All rows' FLOPs are done once, every row of every expert is combined, and what Linear-2
    stores goes to the GPUs in turn."""
    program = build(moe, MACHINE, SMALL_TILE)
    assert sum(int(t["flop"].sum()) for t in program.tasks) == moe.flop
    for gpu, tasks in enumerate(program.tasks):
        second = tasks[tasks["kind"] == LINEAR_2]
        assert second["store_bytes"].sum() == moe.gpu_rows[gpu] * moe.hidden * 2
        to_each = np.bincount(second["owner"], minlength=moe.n_gpus)
        assert to_each.max() - to_each.min() <= 1
        first = tasks[tasks["kind"] == LINEAR_1]
        assert (first["owner"] == gpu).all()


@given(moe=moe_layers)
def test_linear_2_follows_all_of_its_linear_1(moe: MoELayer) -> None:
    """A tile of Linear-2 waits for exactly the Linear-1 tiles of its rows, which come earlier."""
    for tasks in build(moe, MACHINE, SMALL_TILE).tasks:
        first, second = (np.flatnonzero(tasks["kind"] == kind) for kind in (LINEAR_1, LINEAR_2))
        for row in second[::7]:
            task = tasks[row]
            needed = first[tasks["signals"][first] == task["waits_for"]]
            assert needed.size == task["wait_count"] == -(-2 * moe.intermediate // 64)
            assert needed.max() < row
            assert set(tasks["group"][needed]) == {task["group"]}
            assert set(tasks["m0"][needed]) == {task["m0"]}


@given(moe=moe_layers)
def test_orders_permute_and_change_nothing_else(moe: MoELayer) -> None:
    """Interleaving is another order of the same tiles."""
    tasks = (build(dataclasses.replace(moe, order=order), MACHINE, SMALL_TILE).tasks
             for order in ("wave", "interleaved"))
    for ours, theirs in zip(*tasks, strict=True):
        assert (np.sort(ours) == np.sort(theirs)).all()


def test_interleaving_keeps_its_lead() -> None:
    """When a block's Linear-2 begins, Linear-1 is ahead by the lead, or has ended."""
    moe = MoELayer(tokens=1024, hidden=256, intermediate=128, experts=8, top_k=2, n_gpus=2,
                   order="interleaved", min_lead_rows=300)
    tasks = build(moe, MACHINE, SMALL_TILE).tasks[0]
    first = tasks["kind"] == LINEAR_1
    done = np.cumsum(np.where(first & (tasks["n0"] == 0), tasks["m"], 0))
    combined = np.cumsum(np.where(~first & (tasks["n0"] == 0), tasks["m"], 0))
    starts = ~first & (tasks["n0"] == 0)
    ahead = (done - (combined - tasks["m"]))[starts]
    assert ((ahead >= 300) | (done[starts] == moe.gpu_rows[0])).all()
    assert (ahead < 300 + 64).all()


@given(attention=attentions)
def test_attention_is_computed_and_sent_whole(attention: UlyssesAttention) -> None:
    """Every query of every head is computed once, and its output reaches who owns the row, once,
    in every mode and however the sequence divides."""
    for gpu, tasks in enumerate(build(attention, MACHINE, SMALL_TILE).tasks):
        computed = tasks[tasks["kind"] == QUERY_TILE]
        assert computed["flop"].sum() == attention.flop
        assert computed["store_bytes"].sum() == attention.store_bytes
        sent = tasks[tasks["owner"] != gpu]
        if attention.mode != "fused":
            assert (sent["kind"] == COPY).all()
        elements = attention.head_dim * attention.heads // attention.n_gpus
        for owner in set(range(attention.n_gpus)) - {gpu}:
            low, high = attention.shard_rows(owner)
            mine = sent[sent["owner"] == owner]
            assert mine["store_bytes"].sum() == (high - low) * elements * 2
            assert (mine["m0"] >= low).all()
            assert (mine["m0"] + mine["m"] <= high).all()


@pytest.mark.parametrize("mode", ["serial", "dedicated"])
def test_nothing_is_sent_before_it_is_computed(mode: str) -> None:
    """A copy waits for its tile, or for all of them, and dedicated SMs do nothing else."""
    attention = UlyssesAttention(sequence=500, heads=8, n_gpus=4, mode=mode, n_comm_sms=3)
    program = build(attention, MACHINE, SMALL_TILE)
    for tasks in program.tasks:
        copies = np.flatnonzero(tasks["kind"] == COPY)
        assert copies.size
        for row in copies:
            raised = tasks[tasks["signals"] == tasks["waits_for"][row]]
            assert raised.size == tasks["wait_count"][row] == (1 if mode == "dedicated" else 8 * 2)
            assert mode == "serial" or (raised["m0"] == tasks["m0"][row]).all()
        if mode == "dedicated":
            assert set(copies % 24) <= {21, 22, 23}
            assert (np.flatnonzero(tasks["kind"] == QUERY_TILE) % 24 < 21).all()
