"""Kernels that are wrong on purpose, so that the checks prove what they can find.

Each is one textual substitution in the real source: the mistake that somebody could make there.
`HostDevice(edit=WRONG["wrong owner"].edit)` runs one.
"""

from __future__ import annotations

from typing import NamedTuple

from xstage_lab.kernels.source import Source

RESULT, WATCHDOG, RACE, EMULATOR = "result", "watchdog", "race", "emulator"


class Wrong(NamedTuple):
    """A mistake in `fused_tiles.cu` or its headers.

    Attributes
    ----------
    old, new : str
        The text that is replaced, and by what.
    caught_by : str
        The check that must find it: `result` (the output differs from the reference), `watchdog`
        (a wait in vain is reported), `race` (ThreadSanitizer) or `emulator` (the host device
        refuses what no GPU defines).
    finding : str
        What the check's report says, a regular expression.
    store_path, signal : str
        The variant in which the mistake lies.
    """

    old: str
    new: str
    caught_by: str
    finding: str
    store_path: str = "registers"
    signal: str = "release"

    def edit(self, source: Source) -> Source:
        """Return the kernel with the mistake.

        Raises
        ------
        XStageError
            If the source does not hold the text once.
        """
        return source.replace(self.old, self.new)


_HAND_OVER = "if (threadIdx.x % 32 == 0) red_release_cta(&s.full[use % N_SLOTS], 1);"

WRONG = {
    "release weakened to relaxed": Wrong(
        "red_release_cta(&s.full[use % N_SLOTS], 1)", "red_relaxed_cta(&s.full[use % N_SLOTS], 1)",
        RACE, "stage_tile"),
    "acquire of a counter weakened to relaxed": Wrong(
        "wait_at_least<ld_acquire_gpu>", "wait_at_least<ld_relaxed_gpu>", RACE,
        "store_tile|st_global_v4"),
    "counter raised without release": Wrong(
        "red_release_gpu(&p.counters", "red_relaxed_gpu(&p.counters", RACE,
        "store_tile|st_global_v4"),
    "missing __syncwarp before the release": Wrong(
        f"__syncwarp();\n        {_HAND_OVER}", _HAND_OVER, RACE, "stage_tile"),
    "missing __syncwarp after the acquire": Wrong(
        "__syncwarp();  // all lanes see", "// all lanes see", RACE, "stage_tile"),
    "slot reused early": Wrong(
        "if (first && !wait_for_slot(s, p, use, row)) s.gave_up_at_slot = true;", "", RACE,
        "stage_tile"),
    "slot released before its bytes are read": Wrong(
        "    bulk_wait_read<0>();\n", "", RACE, "bulk_wait", store_path="bulk"),
    "bulk copies never waited for": Wrong(
        "    bulk_wait_read<0>();\n", "", EMULATOR, "ends before its bulk copies",
        store_path="bulk", signal="none"),
    "operands read before they arrive": Wrong(
        "cp_async_wait<N_STAGES - 2>();", "cp_async_wait<N_STAGES - 1>();", RESULT, "NaN"),
    "sum runs past the end of k": Wrong(
        "2 * min(max(task.k - k, 0), 8)", "16", RESULT, "tile in row"),
    "tile edge off by one": Wrong(
        "row < task.m && column < row_bytes", "row < task.m - 1 && column < row_bytes", RESULT,
        "NaN"),
    "tile edge forgotten": Wrong(
        "row < task.m && column < row_bytes", "column < row_bytes", RESULT,
        "belongs to none of the tiles"),
    "wrong owner": Wrong(
        "layer.out[task.owner]", "layer.out[task.owner ^ 1]", RESULT, "NaN"),
    "arrival flag lost": Wrong(
        "if (!flags) return;", "if (!flags || row == 1) return;", RESULT, "flag at GPU"),
    "hand-over lost": Wrong(
        _HAND_OVER, _HAND_OVER.replace("% 32 == 0", "% 32 == 0 && threadIdx.x != 96"),
        WATCHDOG, r"waited for a tile in its slot: it saw 7 and needs 8"),
    "slot never released": Wrong(
        "if (first) red_release_cta(&s.empty[slot], 1);", "", WATCHDOG,
        "waited for a tile in its slot: it saw 8 and needs 16"),
    "counter forgotten": Wrong(
        "if (counts) red_release_gpu(&p.counters[task.signals], 1);", "", WATCHDOG,
        "waited for the tasks it depends on: it saw 0"),
    "missing fence.proxy.async": Wrong(
        "        fence_proxy_async();\n", "", EMULATOR, "without a fence.proxy.async",
        store_path="bulk"),
}
