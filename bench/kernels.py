"""Registers, shared memory and spills of the CUDA kernels on every architecture; no GPU needed."""

from __future__ import annotations

from bench.figures import Figure, print_table
from xstage_lab.errors import Infeasible
from xstage_lab.kernels.fused_tiles import STORE_PATHS, TILE_DEPTHS, TILE_SIZES, Variant
from xstage_lab.kernels.nvrtc import ARCHITECTURES, Binary, compile_kernel
from xstage_lab.kernels.source import Source, read

MOST_REGISTERS = 255


def measure() -> list[Figure]:
    """Compile the burst train, and the fused tiles at depth 2, for each architecture."""
    found: dict[str, list[Binary]] = {}
    for name, source, smem in [*_bursts(), *_tiles()]:
        found[f"{name}, {smem}"] = [compile_kernel(source, arch) for arch in ARCHITECTURES
                                    if arch != "sm_80" or "bulk" not in name]
    print_table(("kernel, shared memory of a CTA", *(f"{a} registers" for a in ARCHITECTURES)), [
        (name, *([""] * (len(ARCHITECTURES) - len(binaries))),
         *(str(b.n_registers) for b in binaries)) for name, binaries in found.items()])
    binaries = [binary for each in found.values() for binary in each]
    return [
        Figure(what=f"bytes spilled by {len(binaries)} compiled kernels",
               value=sum(b.spill_bytes for b in binaries), asked=0, unit="B"),
        Figure(what="directives the compiler ignored or warned about",
               value=sum(len(b.warnings) for b in binaries), asked=0),
        Figure(what="registers of a thread, the most", value=max(b.n_registers for b in binaries),
               asked=MOST_REGISTERS),
    ]


def _bursts() -> list[tuple[str, Source, str]]:
    return [(f"burst_gap, {path}", read("burst_gap", N_THREADS=256, BULK=int(path == "bulk")),
             "small") for path in STORE_PATHS]


def _tiles() -> list[tuple[str, Source, str]]:
    kernels = []
    for tile_m in TILE_SIZES:
        for tile_n in TILE_SIZES:
            for tile_k in TILE_DEPTHS:
                try:
                    variant = Variant(tile_m=tile_m, tile_n=tile_n, tile_k=tile_k, issue_depth=2,
                                      out_dtype="bf16", signal="none", n_stages=3,
                                      store_path="registers")
                except Infeasible:  # 256x256: its sums do not fit in registers
                    continue
                kernels.append((f"fused_tiles {tile_m}x{tile_n}x{tile_k}", variant.source,
                                f"{variant.shared_bytes / 1024:.0f} KiB"))
    return kernels
