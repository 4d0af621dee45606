"""Right answers to compare kernels with, and the words for a wrong one."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xstage_lab.errors import XStageError

POISON = 0xFF  # of every output byte before a run: a NaN in bf16 and fp32
_SUM_LOSS, _BF16_ROUND_OFF = 2.0**-23, 2.0**-8


class WrongResult(XStageError):
    """A kernel computed or stored something else than it should."""


class Tile(NamedTuple):
    """Where a tile lies in the output, and who owns it.

    Attributes
    ----------
    row : int
        Row of the GPU's task array.
    owner : int
        GPU it is stored to, -1 for none.
    m0, n0, m, n : int
        First row and column, rows and columns.
    """

    row: int
    owner: int
    m0: int
    n0: int
    m: int
    n: int


def random_bf16(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.uint16]:
    """Return raw bf16 values between -1 and 1, evenly spread."""
    return to_bf16(rng.uniform(-1.0, 1.0, shape).astype(np.float32))


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round finite fp32 values to nearest even bf16, raw bits."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return raw bf16 values as fp32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def product(
    a: NDArray[np.uint16], b: NDArray[np.uint16], out_dtype: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return a b^T, and how far a right kernel may be from it.

    A kernel adds up the k products of an element in fp32, in an order of its own. A Tensor Core
    takes 16 at a time and cuts off instead of rounding, which may lose 2^-21 of the partial sum.
    Random products add up like a random walk: partial sums stay below 4 |a||b| / sqrt(k), with
    |a| and |b| the norms of row and column. So k/16 additions lose less than
    sqrt(k) 2^-23 |a||b|. One missing product, of size |a||b| / k, stands out to k of some 10,000.
    bf16 output adds its rounding, 2^-8 of the element.

    Parameters
    ----------
    a : uint16 array of shape (m, k)
    b : uint16 array of shape (n, k)
        Raw bf16 values.
    out_dtype : str
        `bf16` or `fp32`, what the kernel's result was rounded to.

    Returns
    -------
    expected, tolerance : float64 arrays of shape (m, n)
        Computed in fp64, by torch where it has a GPU, else by NumPy.
    """
    left, right = from_bf16(a).astype(np.float64), from_bf16(b).astype(np.float64)
    expected = _matmul(left, right.T)
    norms = np.outer(np.linalg.norm(left, axis=1), np.linalg.norm(right, axis=1))
    tolerance = math.sqrt(a.shape[1]) * _SUM_LOSS * norms
    if out_dtype == "bf16":
        tolerance += _BF16_ROUND_OFF * (np.abs(expected) + tolerance)
    return expected, tolerance


def _matmul(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    if a.shape[0] * a.shape[1] * b.shape[1] > 2**32:  # a second or more for a CPU
        try:
            import torch
        except ImportError:
            return a @ b
        if torch.cuda.is_available():
            on_gpu = torch.from_numpy(a).cuda() @ torch.from_numpy(b).cuda()
            result: NDArray[np.float64] = on_gpu.cpu().numpy()
            return result
    return a @ b


def check_output(
    out: NDArray[Any],
    expected: NDArray[np.float64],
    tolerance: NDArray[np.float64],
    tiles: list[Tile],
    *,
    gpu: int,
) -> None:
    """Check where one GPU's tiles went: every element of every tile, and nothing else.

    Parameters
    ----------
    out : uint16 (bf16) or float32 array of shape (n_gpus, m or more, ld)
        What each owner has got from `gpu`, filled with `POISON` bytes before the run. Rows hold
        n columns and are rounded up to 16 bytes.
    expected, tolerance : float64 arrays of shape (m, n)
        As `product` returns them.
    tiles : list of Tile
        What `gpu` had to store where.
    gpu : int
        The GPU that stored.

    Raises
    ------
    WrongResult
        Naming GPU, tile, owner, element, what was expected and what is there.
    """
    untouched = np.ones(out.shape, bool)
    per_16_bytes = 16 // out.itemsize
    for tile in tiles:
        if tile.owner < 0:
            continue
        rows, columns = slice(tile.m0, tile.m0 + tile.m), slice(tile.n0, tile.n0 + tile.n)
        stored = slice(tile.n0, tile.n0 + -(-tile.n // per_16_bytes) * per_16_bytes)
        untouched[tile.owner, rows, stored] = False
        got = _values(out[tile.owner, rows, columns])
        far = ~(np.abs(got - expected[rows, columns]) <= tolerance[rows, columns])  # NaN is far
        if far.any():
            i, j = np.argwhere(far)[0]
            at = (tile.m0 + i, tile.n0 + j)
            raise WrongResult(
                f"GPU {gpu}, tile in row {tile.row} (rows from {tile.m0}, columns from {tile.n0}, "
                f"owner GPU {tile.owner}): element ({at[0]}, {at[1]}) is {_shown(got[i, j])}, "
                f"expected {expected[at]:.6g} within {tolerance[at]:.2g}; "
                f"{int(far.sum())} of {far.size} elements of the tile are wrong.")
    bytes_of = out.view(np.uint8).reshape(*out.shape, out.itemsize)
    written = untouched & (bytes_of != POISON).any(axis=-1)
    if written.any():
        owner, i, j = np.argwhere(written)[0]
        raise WrongResult(
            f"GPU {gpu} wrote element ({i}, {j}) of GPU {owner}, which belongs to none of the "
            f"tiles it stores there: expected nothing, got "
            f"{_shown(_values(out[owner, i, j : j + 1])[0])}.")


def _values(raw: NDArray[Any]) -> NDArray[np.float64]:
    plain = from_bf16(np.ascontiguousarray(raw)) if raw.dtype == np.uint16 else raw
    return plain.astype(np.float64)


def _shown(value: float) -> str:
    return "NaN (never written, or computed from what was not loaded)" if math.isnan(value) else (
        f"{value:.6g}")


def burst_words(seed: int, cta: int, burst: int, n_words: int) -> NDArray[np.uint32]:
    """Return the words that `burst_gap.cu` stores as burst `burst` of CTA `cta`."""
    x = seed
    for word in (cta, burst):
        x = (x ^ word) * 0x9E3779B1 & 0xFFFFFFFF
        x ^= x >> 15
        x = x * 0x85EBCA77 & 0xFFFFFFFF
        x ^= x >> 13
    return (x + np.arange(n_words, dtype=np.uint64)).astype(np.uint32)


def check_bursts(region: NDArray[np.uint32], *, seed: int, n_bursts: int, gpu: int) -> None:
    """Check what the CTAs of one GPU have left where they store.

    Parameters
    ----------
    region : uint32 array of shape (n_ctas, n_slots, words of a burst)
    seed, n_bursts : int
        As the kernel was given them; slot i holds the last burst j with j % n_slots = i.
    gpu : int
        The GPU that stored.

    Raises
    ------
    WrongResult
        Naming GPU, CTA, burst, word, what was expected and what is there.
    """
    n_ctas, n_slots, n_words = region.shape
    for cta in range(n_ctas):
        for slot in range(min(n_slots, n_bursts)):
            burst = slot + (n_bursts - 1 - slot) // n_slots * n_slots
            expected = burst_words(seed, cta, burst, n_words)
            wrong = region[cta, slot] != expected
            if wrong.any():
                word = int(np.argmax(wrong))
                raise WrongResult(
                    f"GPU {gpu}, CTA {cta}, burst {burst}: word {word} is "
                    f"{int(region[cta, slot, word]):#010x}, expected {int(expected[word]):#010x}; "
                    f"{int(wrong.sum())} of {n_words} words are wrong.")
