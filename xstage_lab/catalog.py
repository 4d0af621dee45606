"""Named machines and links with what was published about them, and what has to be supposed.

A figure that nobody published is NaN. Nothing is guessed unless `with_assumptions` is asked to,
and then every guess is named.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from xstage_lab import units
from xstage_lab.datafiles import data_path
from xstage_lab.errors import FileRejected, UnknownFact, UnknownName, require_number
from xstage_lab.machinefile import load_user_file as load_user_file
from xstage_lab.spec import LinkSpec, MachineSpec, MoELayer, UlyssesAttention
from xstage_lab.tables import UNITS, scaled
from xstage_lab.tables import table as table

Spec = TypeVar("Spec")

#: What headers leave of a link's marketed rate when every store carries 128 bytes.
STORE_CEILING_RATIO = (0.80, 0.82)
#: What one SM is supposed to have outstanding at most, where nobody measured it.
SUPPOSED_PER_SM_BYTES = 64.0 * 1024


def machines() -> dict[str, MachineSpec]:
    """Return the machines of `data/machines.csv` by name, as published: NaN is not known."""
    return dict(_published_machines())


def links() -> dict[str, LinkSpec]:
    """Return the links of `data/links.csv` and those of the machines, by name.

    Where machines share a link, it is that of the first of them.
    """
    found = dict(_published_links())
    for known in machines().values():
        found.setdefault(known.link.name, known.link)
    return found


def machine(name: str) -> MachineSpec:
    """Return one machine.

    Parameters
    ----------
    name : str
        A name of `machines()`; or the path of a machine file, ``my.csv``, or ``my.csv:NAME``
        where the file holds several.

    Raises
    ------
    UnknownName
        With the nearest names.
    FileRejected
        Naming file, row, column and reason.
    """
    path, entry = _split(name)
    if path is None:
        return _pick("machine", entry, machines())
    found = _pick(f"machine of {path}", entry, load_user_file(path))
    if not isinstance(found, MachineSpec):
        raise FileRejected(path, "describes links, not machines: it has no column 'machine'.")
    return found


def link(name: str) -> LinkSpec:
    """Return one link by a name of `links()`, or from a link or machine file as in `machine`."""
    path, entry = _split(name)
    if path is None:
        return _pick("link", entry, links())
    found = _pick(f"link of {path}", entry, load_user_file(path))
    return found.link if isinstance(found, MachineSpec) else found


def with_link(machine: MachineSpec, link: LinkSpec) -> MachineSpec:
    """Return `machine` on another link.

    How fast an SM issues, and what it holds, belong to the SM: where `link` does not say,
    `machine` keeps its own figures.
    """
    kept = {
        field: getattr(machine.link, field)
        for field in ("per_sm_bytes_per_s", "issue_latency_s", "per_sm_capacity_bytes")
        if math.isnan(getattr(link, field))
    }
    assumed = link.assumed | (machine.link.assumed & set(kept))
    return dataclasses.replace(machine, link=dataclasses.replace(link, **kept, assumed=assumed))


def with_parameters(
    machine: MachineSpec,
    *,
    drain_bytes_per_s: float | None = None,
    capacity_bytes: float | None = None,
    per_sm_bytes_per_s: float | None = None,
    issue_latency_s: float | None = None,
) -> MachineSpec:
    """Return `machine` with the law's parameters as somebody entered them; they become ASSUMED.

    `drain_bytes_per_s` is both what goes out and what comes in; `capacity_bytes` is that of all
    SMs together, so that one SM's own limit must not cut it. None leaves what is known.

    Raises
    ------
    InvalidValue
        Naming the parameter, its unit and range.
    """
    entered = {"drain_bytes_per_s": (drain_bytes_per_s, "B/s"),
               "capacity_bytes": (capacity_bytes, "B"),
               "per_sm_bytes_per_s": (per_sm_bytes_per_s, "B/s"),
               "issue_latency_s": (issue_latency_s, "s")}
    for name, (value, unit) in entered.items():
        if value is not None and not (name == "capacity_bytes" and value == math.inf):
            require_number(name, value, low=0.0, open_low=name != "issue_latency_s", unit=unit)
    given: dict[str, float] = {}
    if drain_bytes_per_s is not None:
        given |= {"egress_bytes_per_s": drain_bytes_per_s,
                  "ingress_bytes_per_s": drain_bytes_per_s}
    if capacity_bytes is not None:
        known = machine.link.per_sm_capacity_bytes
        one_sm = SUPPOSED_PER_SM_BYTES if math.isnan(known) else known
        given |= {"path_capacity_bytes": capacity_bytes,
                  "per_sm_capacity_bytes": max(one_sm, capacity_bytes / machine.n_sms)}
    if per_sm_bytes_per_s is not None:
        given["per_sm_bytes_per_s"] = per_sm_bytes_per_s
    if issue_latency_s is not None:
        given["issue_latency_s"] = issue_latency_s
    return dataclasses.replace(machine, link=machine.link.replace(**given))


def constants() -> dict[str, float]:
    """Return the constants that X-Stage reports, in SI, by quantity and unit suffix.

    For instance `issue_free_time_s`, `drain_rate_bytes_per_s`, `outstanding_capacity_bytes`;
    ``table("xstage_constants")`` says under which condition each was measured.

    References
    ----------
    arXiv 2607.23264 v1, read through public notes.
    """
    found = {}
    for row in table("xstage_constants"):
        unit = str(row["unit"]).lower().replace("/s", "_per_s")
        scale, suffix = UNITS.get(unit, (1.0, unit))
        found[f"{row['quantity']}_{suffix}"] = scaled(float(row["value"]), scale)
    return found


def moe_models() -> dict[str, MoELayer]:
    """Return the models of `data/moe_models.csv` by name, with one token on each of 8 GPUs."""
    return {str(row["model"]): MoELayer(
        tokens=1, hidden=int(row["hidden"]), intermediate=int(row["moe_intermediate"]),
        experts=int(row["experts"]), top_k=int(row["top_k"])) for row in table("moe_models")}


def moe_layer(model: str, tokens: int, **fields: Any) -> MoELayer:
    """Return the expert layers of a model of `moe_models()` for `tokens` on each GPU.

    Raises
    ------
    UnknownName, InvalidValue
        With the nearest names; or what of `fields` is impossible.
    """
    return dataclasses.replace(_pick("MoE model", model, moe_models()), tokens=tokens, **fields)


def attention_models() -> dict[str, UlyssesAttention]:
    """Return the models of `data/attention_models.csv` by name, on one GPU.

    Their heads need not divide over the GPUs of a node.
    """
    return {str(row["model"]): UlyssesAttention(
        sequence=int(row["sequence_tokens"]), heads=int(row["heads"]),
        head_dim=int(row["head_dim"]), n_gpus=1) for row in table("attention_models")}


def attention(model: str, **fields: Any) -> UlyssesAttention:
    """Return the attention of a model of `attention_models()`, with other `fields`.

    Raises
    ------
    UnknownName, InvalidValue
        With the nearest names; or what of `fields` is impossible.
    """
    return dataclasses.replace(_pick("attention model", model, attention_models()), **fields)


def with_assumptions(machine: MachineSpec) -> MachineSpec:
    """Return `machine` with every unknown of its store path supposed, and named in `assumed`.

    ============================ ====================================================
    unknown                      supposed
    ============================ ====================================================
    egress, the drain rate R     the middle of the range that was measured
    ingress                      equal to egress
    one SM's issue rate          R / 24: two dozen SMs saturate NVLink by register stores
    issue latency                0
    capacity of the shared path  R times Q / R of X-Stage's machine, 6.2 us
    capacity of one SM           64 KiB
    credit latency               2 us
    credits at the destination   twice R times the credit latency, so that R decides
    ============================ ====================================================

    Rates of computing, memory sizes and clocks stay unknown where they are.

    Raises
    ------
    UnknownFact
        If neither R nor a range of it is known.
    """
    known = machine.link
    drain = known.egress_bytes_per_s
    if math.isnan(drain):
        drain = 0.5 * (known.egress_low_bytes_per_s + known.egress_high_bytes_per_s)
    if math.isnan(drain):
        raise UnknownFact(
            "the drain rate R (egress_bytes_per_s)",
            machine.name,
            "nobody published its store rate. Enter one with --drain-bytes-per-s, or fill "
            "store_gb_per_s_measured in a machine file of your own "
            "(as in data/machines_example.csv).",
        )
    latency = 2e-6 if math.isnan(known.credit_latency_s) else known.credit_latency_s
    reported = constants()
    held_s = reported["outstanding_capacity_bytes"] / reported["drain_rate_bytes_per_s"]
    supposed = {
        "egress_bytes_per_s": drain,
        "ingress_bytes_per_s": drain,
        "per_sm_bytes_per_s": drain / 24,
        "issue_latency_s": 0.0,
        "path_capacity_bytes": drain * held_s,
        "per_sm_capacity_bytes": SUPPOSED_PER_SM_BYTES,
        "credit_latency_s": latency,
        "credit_bytes": 2.0 * drain * latency,
    }
    missing = {field: v for field, v in supposed.items() if math.isnan(getattr(known, field))}
    return dataclasses.replace(machine, link=known.replace(**missing))


def flags(machine: MachineSpec) -> list[str]:
    """Return what is suspicious in a machine's figures, a sentence each; empty if nothing is."""
    path = machine.link
    vendor = path.vendor_bytes_per_s
    rates = {
        "store rate": path.egress_bytes_per_s,
        "high end of the store rate": path.egress_high_bytes_per_s,
        "ingress rate": path.ingress_bytes_per_s,
    }
    return [
        f"{machine.name}: the {what} of {_rate(rate)} is above the {_rate(vendor)} that "
        f"{path.name} is marketed with. Check the unit, that one direction is meant, and that "
        "bytes a GPU stores to itself are not counted."
        for what, rate in rates.items()
        if rate > vendor  # never so where either is not known
    ]


def ceiling(link: LinkSpec) -> str:
    """Return in words what stores can reach on `link`, and where its rate stands against that."""
    vendor, rate = link.vendor_bytes_per_s, link.egress_bytes_per_s
    if math.isnan(vendor):
        return f"The marketed rate of {link.name} is not known, and so neither is its ceiling."
    low, high = STORE_CEILING_RATIO
    found = (
        f"Stores carry 128-byte payloads, which reach {_rate(low * vendor)} to "
        f"{_rate(high * vendor)} of the {_rate(vendor)} that {link.name} is marketed with"
    )
    if math.isnan(rate):
        return f"{found}."
    share = rate / vendor
    found = f"{found}; {_rate(rate)} is {share:.0%} of the marketed rate"
    if 0.95 * low <= share <= 1.05 * high:
        return f"{found}, the normal ceiling and not a fault."
    return f"{found}, {'below' if share < low else 'above'} that ceiling."


def _rate(bytes_per_s: float) -> str:
    return units.text("_bytes_per_s", bytes_per_s)


@functools.cache
def _published_machines() -> Mapping[str, MachineSpec]:
    found = load_user_file(data_path("machines.csv"))
    return {name: spec for name, spec in found.items() if isinstance(spec, MachineSpec)}


@functools.cache
def _published_links() -> Mapping[str, LinkSpec]:
    found = load_user_file(data_path("links.csv"))
    return {name: spec for name, spec in found.items() if isinstance(spec, LinkSpec)}


def _split(name: str) -> tuple[str | None, str]:
    """Return path and entry of ``my.csv:NAME``; the path is None for a plain name."""
    found = re.fullmatch(r"(.+\.csv)(?::(.+))?", name, re.IGNORECASE)
    return (found[1], found[2] or "") if found else (None, name)


def _pick(kind: str, name: str, known: Mapping[str, Spec]) -> Spec:
    if not name and len(known) == 1:
        return next(iter(known.values()))
    if name not in known:
        raise UnknownName(kind, name, known)
    return known[name]
