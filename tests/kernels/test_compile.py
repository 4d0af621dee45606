"""Kernels compile for every architecture, and the machine code is what their text says."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import pytest

from xstage_lab.errors import DeviceUnavailable, Infeasible, InvalidValue, UnknownName, XStageError
from xstage_lab.kernels import nvrtc
from xstage_lab.kernels.fused_tiles import (
    SIGNALS,
    STORE_PATHS,
    TILE_DEPTHS,
    TILE_SIZES,
    Variant,
    leading_dimension,
    require_aligned,
)
from xstage_lab.kernels.nvrtc import ARCHITECTURES, Binary, CompileFailed, compile_kernel
from xstage_lab.kernels.source import Source, cache_folder, read

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="there is no NVRTC for macOS")

TILES = [(m, n, k) for m, n, k in itertools.product(TILE_SIZES, TILE_SIZES, TILE_DEPTHS)
         if (m, n) != (256, 256)]
# Each tile with other values of what else there is, so that all values occur on each architecture.
OTHERS = list(zip(itertools.cycle([2, 1, 3, 4]), itertools.cycle(["bf16", "fp32", "bf16"]),
                  itertools.cycle(SIGNALS), itertools.cycle([3, 2, 4, 3, 5]), range(len(TILES))))
SMEM_BYTES = {"sm_80": 163 * 1024, "sm_90a": 227 * 1024, "sm_100a": 227 * 1024}


def variants(arch: str) -> list[Variant]:
    """Variants that cover the tiles and, among them, every other value the kernel takes."""
    paths = STORE_PATHS if arch != "sm_80" else STORE_PATHS[:1]
    return [Variant(tile_m=m, tile_n=n, tile_k=k, issue_depth=depth, out_dtype=dtype,
                    signal=signal, n_stages=n_stages, store_path=path)
            for (m, n, k), (depth, dtype, signal, n_stages, i) in zip(TILES, OTHERS, strict=True)
            for path in paths if path == "registers" or i % 2 == 0]


def bursts(arch: str) -> list[Source]:
    """The burst train's variants."""
    return [read("burst_gap", N_THREADS=n, BULK=bulk) for n in (32, 256, 1024)
            for bulk in ((0,) if arch == "sm_80" else (0, 1))]


def sass(binary: Binary, folder: Path) -> list[str]:
    """The instructions of a compiled kernel, in order, without addresses."""
    files = metadata.files("nvidia-cuda-nvdisasm") or []
    tool = next(f.locate() for f in files if f.name in ("nvdisasm", "nvdisasm.exe"))
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(binary.cubin)
    done = subprocess.run([str(tool), "-c", str(cubin)], capture_output=True, text=True, check=True)
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]+(?: [^;]*)?);",
                      done.stdout)


def names(instructions: list[str]) -> set[str]:
    """The instructions' names without operands."""
    return {line.split()[0] for line in instructions}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_everything_fits_in_registers(arch: str) -> None:
    """No variant of a kernel spills, warns or leaves a directive out, on any architecture."""
    sources = [v.source for v in variants(arch)] + bursts(arch)
    with ThreadPoolExecutor(2) as pool:
        binaries = list(pool.map(lambda source: compile_kernel(source, arch), sources))
    assert [(s.options, b.spill_bytes, b.warnings) for s, b in zip(sources, binaries, strict=True)
            if b.spill_bytes or b.warnings] == []
    assert all(0 < b.n_registers <= 255 for b in binaries)


def test_spills_and_warnings_are_seen() -> None:
    """A kernel made to spill and a directive that is ignored are both reported."""
    body = "".join(f"float x{i} = p[{i}];" for i in range(200))
    use = "".join(f"p[{i}] = x{199 - i} * x{i};" for i in range(200))
    text = ('extern "C" __global__ void __launch_bounds__(1024) k(volatile float* p) '
            f"{{ {body} {use} }}")
    assert compile_kernel(Source(name="k", text=text, defines={}), "sm_90a").spill_bytes > 0
    text = ('extern "C" __global__ void k(float* p) {'
            'asm volatile("setmaxnreg.inc.sync.aligned.u32 240;"); p[threadIdx.x] = 1.0f; }')
    assert compile_kernel(Source(name="k", text=text, defines={}), "sm_90a").warnings != []


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_machine_code(arch: str, tmp_path: Path) -> None:
    """Loads are asynchronous, products are the Tensor Core's, and stores have 16 bytes."""
    code = names(sass(compile_kernel(Variant().source, arch), tmp_path))
    assert any(name.startswith("HMMA.16816.F32.BF16") for name in code)
    assert any(name.startswith("LDGSTS") and "128" in name for name in code)
    assert {"LDSM.16.M88.4", "STG.E.128", "LDS.128"} <= code
    assert not any(name.startswith(("LDL", "STL", "UBLKCP")) for name in code)
    assert any(name.startswith("USETMAXREG") for name in code) == (arch != "sm_80")
    code = names(sass(compile_kernel(bursts(arch)[0], arch), tmp_path))
    assert "STG.E.128" in code


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_bulk_copies_replace_stores(arch: str, tmp_path: Path) -> None:
    """On the bulk path tiles and bursts leave by bulk copies and by no 16-byte store."""
    for source in (Variant(store_path="bulk").source, bursts(arch)[1]):
        code = names(sass(compile_kernel(source, arch), tmp_path))
        assert any(name.startswith("UBLKCP") for name in code)
        assert "STG.E.128" not in code


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("signal", SIGNALS)
def test_issue_span_holds_no_fence(arch: str, signal: str, tmp_path: Path) -> None:
    """The clock is read right around the stores, and fences come after the slot's release."""
    code = sass(compile_kernel(Variant(signal=signal).source, arch), tmp_path)
    stores = [i for i, line in enumerate(code) if line.startswith("STG.E.128")]
    clocks = [i for i, line in enumerate(code) if "SR_CLOCKLO" in line]
    start = max(i for i in clocks if i < stores[0])
    end = min(i for i in clocks if i > stores[-1])
    release = next(i for i in range(end, len(code)) if code[i].startswith("ATOM"))
    waits = re.compile(r"MEMBAR|CCTL|ERRBAR|DEPBAR|RED|ATOM|BAR\.")
    assert [line for line in code[start:end] if waits.match(line)] == []
    assert [line for line in code[end:release] if re.match(r"MEMBAR.*(GPU|SYS)|RED", line)] == []
    assert any(re.match(r"MEMBAR.*SYS", line) for line in code[release:]) == (signal != "none")


def test_error_shows_the_line() -> None:
    """What does not compile is told with its file, its line and the text that stands there."""
    source = Variant().source.replace("stage_tile(sums, slot_of(s, use));",
                                      "stage_tile(sums, slot_of(s, usage));")
    line = next(i for i, text in enumerate((Path(nvrtc.__file__).parent / "fused_tiles.cu")
                                           .read_text().splitlines(), start=1)
                if "stage_tile(sums, slot_of" in text)
    with pytest.raises(CompileFailed, match=rf"fused_tiles\.cu\({line}\)(.|\n)*slot_of\(s, usage"):
        compile_kernel(source, "sm_80")


@pytest.mark.parametrize("missing", ["TILE_M", "N_STAGES", "SIGNAL"])
def test_missing_parameter(missing: str) -> None:
    """A parameter left out is named by the compiler."""
    source = Variant().source
    defines = {name: value for name, value in source.defines.items() if name != missing}
    with pytest.raises(CompileFailed, match=missing):
        compile_kernel(Source(name=source.name, text=source.text, defines=defines), "sm_80")


def test_wrong_shared_memory_does_not_compile() -> None:
    """The kernel refuses another size of shared memory than the one it lays out."""
    source = Variant().source
    defines = {**source.defines, "SHARED_BYTES": source.defines["SHARED_BYTES"] - 1024}
    with pytest.raises(CompileFailed, match="SHARED_BYTES is not what the kernel needs"):
        compile_kernel(Source(name=source.name, text=source.text, defines=defines), "sm_80")


def test_bulk_copies_need_sm_90() -> None:
    """The bulk path on an older architecture is refused in words."""
    with pytest.raises(CompileFailed, match="needs sm_90"):
        compile_kernel(Variant(store_path="bulk").source, "sm_80")


def test_compiled_code_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is compiled once per source and architecture, and damage to what is kept heals."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = read("burst_gap", N_THREADS=64, BULK=0)
    first = compile_kernel(source, "sm_80")
    kept, = cache_folder().iterdir()
    assert tmp_path in kept.parents
    monkeypatch.setattr(nvrtc, "_compile", None)
    assert compile_kernel(source, "sm_80").cubin == first.cubin
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept.write_bytes(kept.read_bytes()[:100])
    assert compile_kernel(source, "sm_80").cubin == first.cubin
    compile_kernel(source, "sm_90a")
    compile_kernel(read("burst_gap", N_THREADS=32, BULK=0), "sm_80")
    assert len(list(cache_folder().iterdir())) == 3


def test_no_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing can be kept kernels compile all the same."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compile_kernel(read("burst_gap", N_THREADS=32, BULK=0), "sm_80").cubin


def test_without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without NVRTC's packages the error says what to install."""
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(DeviceUnavailable, match=r"pip install .*cuda-bindings.*nvidia-cuda-nvrtc"):
        compile_kernel(Variant().source, "sm_90a")


def test_unknown_names() -> None:
    """A kernel or an architecture that there is not is told with those that there are."""
    with pytest.raises(UnknownName, match="fused_tiles"):
        read("fused_tile")
    with pytest.raises(UnknownName, match="sm_90a"):
        compile_kernel(Variant().source, "sm_90")


def test_source_is_self_contained() -> None:
    """A kernel's text includes nothing and every header once, and its digest covers parameters."""
    source = Variant().source
    assert "#include" not in source.text
    assert source.text.count("struct WaitLimit {") == 1
    assert source.digest == Variant().source.digest
    assert source.digest != Variant(issue_depth=3).source.digest
    assert source.digest != source.replace("red_release_cta(&s.empty", "red_relaxed_cta(&s.empty")


@pytest.mark.parametrize(("old", "n_places"), [("no such text", 0), ("__syncwarp();", 4)])
def test_substitution_needs_one_place(old: str, n_places: int) -> None:
    """A substitution that would change nothing or several places is refused."""
    with pytest.raises(XStageError, match=rf"occurs {n_places} times"):
        Variant().source.replace(old, "")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"tile_m": 96}, r"tile_m = 96 .*64 or 128 or 256"),
        ({"tile_k": 128}, r"tile_k = 128 .*32 or 64"),
        ({"tile_m": 256, "tile_n": 256}, r"256 fp32 sums .* registers allow 128"),
        ({"n_stages": 1}, r"n_stages = 1 .*from 2"),
        ({"issue_depth": 0}, r"issue_depth = 0 .*from 1"),
        ({"store_path": "multicast"}, r"store_path 'multicast'.*registers"),
        ({"signal": "flag"}, r"signal 'flag'.*release"),
        ({"out_dtype": "fp16"}, r"out_dtype 'fp16'.*fp32"),
    ],
)
def test_impossible_variant(fields: dict[str, int | str], told: str) -> None:
    """A variant the kernel does not have is refused with the value and the limit."""
    with pytest.raises((InvalidValue, Infeasible, UnknownName), match=told):
        Variant(**fields)  # type: ignore[arg-type]


def test_shared_memory_limit() -> None:
    """A variant over the device's shared memory is refused with both sizes and the way out."""
    variant = Variant(tile_m=256, tile_n=128, issue_depth=3)
    variant.require_shared(variant.shared_bytes)
    with pytest.raises(Infeasible, match=r"256x128x64 .* needs 281 KiB .* allows 227 KiB.*smaller"):
        variant.require_shared(SMEM_BYTES["sm_90a"])


@pytest.mark.parametrize(("address", "ld", "told"), [
    (4096, 100, "leading dimension of a = 200 bytes"), (4104, 104, "address of a = '0x1008'")])
def test_unaligned_matrix(address: int, ld: int, told: str) -> None:
    """A matrix that 16-byte accesses cannot read is refused with what is wrong and the way out."""
    require_aligned("a", 4096, leading_dimension(100, 2), 2)
    with pytest.raises(InvalidValue, match=f"{told}.*multiples of 16"):
        require_aligned("a", address, ld, 2)
