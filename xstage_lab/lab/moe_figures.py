"""The figures of the MoE panel: both orders of one layer, and the layers of others beside it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xstage_lab import analysis, catalog, law, plots
from xstage_lab.analysis import Comparison, Interleaving, Shares
from xstage_lab.analysis.shares import second_layer
from xstage_lab.devices.recorded import published_wave_lag
from xstage_lab.errors import XStageError
from xstage_lab.lab import style
from xstage_lab.lab.machine import calibration_of
from xstage_lab.lab.picture import NAMES, Picture, Point, Values
from xstage_lab.record import SUMMARY_KEYS, Record
from xstage_lab.spec import MachineSpec, MoELayer, Tuning
from xstage_lab.spec.moe import ORDERS
from xstage_lab.units import text

#: Tokens of each GPU in series and on the map.
TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
SHAPE = ("hidden", "intermediate", "experts", "top_k")
_HERE, _LARGE, _XSTAGE = "these settings", "large weights", "X-Stage"
_NOT_MODELLED = (
    "Not modelled: the dispatch, which in waves shares the links with the first combine stores; "
    "reductions at the owner; the activation between the layers; tiles handed out on demand.")


@dataclass(frozen=True, kw_only=True)
class MoEPicture(Picture):
    """What the figures show of one layer, in either order.

    Attributes
    ----------
    moe : MoELayer
        In the chosen order.
    verdict : Interleaving
    by_order : dict of str to Comparison
        Of each order with the last measurement of these very settings.
    layer_at : callable
        Takes changed settings and returns their layer; raises `XStageError` where impossible.
    """

    moe: MoELayer
    tuning: Tuning
    verdict: Interleaving
    by_order: dict[str, Comparison]
    layer_at: Callable[[Values], MoELayer]

    def table(self) -> str:
        """Return both orders' summaries as an HTML table, predicted and measured."""
        columns = {"": [*(NAMES[key] for key in SUMMARY_KEYS), "speed-up"]}
        predicted = {order: found.summary for order, found in self.verdict.predictions.items()}
        measured = {order: found.measured for order, found in self.by_order.items()}
        for order in predicted:
            columns[f"{order}, PREDICTED"] = _column(predicted, order)
        for order, compared in self.by_order.items():
            badge = str(compared.provenance["measured"]["badge"])
            columns[f"{order}, {badge}"] = _column(measured, order)
            columns["error" + " " * len(columns)] = [
                *(analysis.error_text(key, compared) for key in SUMMARY_KEYS), ""]
        return style.table(list(columns), zip(*columns.values(), strict=True))

    def explanation(self) -> list[str]:
        """Return which order, why, how far off the law was, and what it leaves out."""
        found, t = list(self.verdict.sentences), self.verdict.terms
        most = t["wave_s"] / max(t["wave_s"] - t["stall_wave_s"], 1e-12)
        found.append(f"Without any wait for the store path waves would be {most:.2f} times as "
                     "fast: no order gains more from the path than that.")
        found += self._published()
        for order, compared in self.by_order.items():
            found.append(f"{order.capitalize()}: {compared.explain[-1]}")
        return [*found, *analysis.unsure_words(self.prediction), _NOT_MODELLED]

    def _published(self) -> list[str]:
        """Set the prediction beside the published times of this very layer, if there are any."""
        of = {record.parameters["order"]: record for record in published_wave_lag()
              if record.provenance["machine"] == self.machine.name
              and all(getattr(self.moe, name) == value
                      for name, value in record.parameters.items()
                      if name not in ("workload", "order"))}
        if not of:
            return []
        both = {order: record.summary["total_s"] for order, record in of.items()}
        gain = both["wave"] / both["interleaved"] - 1.0
        share = self.verdict.gain_ratio / gain
        explained = f"{share:.0%}" if share > 0.005 else "nothing"
        return [f"Published of this layer (RECORDED): {text('_s', both['wave'])} in waves, "
                f"{text('_s', both['interleaved'])} with Linear-2 trailing, {1 + gain:.2f} times "
                f"as fast; order and store path explain {explained} of that gain."]

    def compute_source(self) -> str:
        """Return in words where a tile's compute time comes from."""
        return ", compute time from FLOP and memory rates"

    def here(self) -> dict[str, Record]:
        """Return the record of each order to draw: the last overlaid one, else the last here."""
        found = {}
        for order in ORDERS:
            if shown := self.records(order=order):
                found[order] = shown[-1]
        return found


def orders(plot: plots.OrdersOverTime, picture: MoEPicture) -> list[Record]:
    """Draw both orders over time: as measured where there are tiles, else as predicted."""
    runs = {order: record for order, record in picture.here().items() if record.tiles is not None}
    predicted = picture.verdict.predictions
    end_s = max(runs[order].summary["total_s"] if order in runs else
                predicted[order].summary["total_s"] for order in ORDERS)
    shares = {order: _shares(picture, order, runs.get(order), end_s) for order in ORDERS}
    plot.update(
        {order: {"time_s": of.time_s, "first_ratio": of.first_ratio,
                 "second_ratio": of.second_ratio, "wait_ratio": of.wait_ratio,
                 "issue_ratio": of.issue_ratio} for order, of in shares.items()},
        {order: {"time_s": of.backlog_s, "backlog_bytes": of.backlog_bytes}
         for order, of in shares.items()},
        capacity_bytes=picture.prediction.terms["capacity_bytes"],
        badges=_both({order: str(runs[order].provenance["badge"]) if order in runs
                      else "PREDICTED, means over rounds" for order in ORDERS}) + "; GPU 0")
    return list(runs.values())


def _both(badges: dict[str, str]) -> str:
    if len(set(badges.values())) == 1:
        return badges["wave"]
    return "; ".join(f"{order} {badge}" for order, badge in badges.items())


def _shares(picture: MoEPicture, order: str, record: Record | None, end_s: float) -> Shares:
    if record is not None:
        return analysis.measured_shares(record, end_s)
    return analysis.predicted_shares(dataclasses.replace(picture.moe, order=order),
                                     picture.machine, picture.calibration, picture.tuning, end_s)


def timeline(plot: plots.Timeline, picture: MoEPicture) -> list[Record]:
    """Draw one SM of the chosen order, its MMA coloured by layer."""
    record = picture.here().get(picture.moe.order)
    shown = [record] if record is not None and record.tiles is not None else []
    part: NDArray[np.str_] = np.array("MMA")
    for each in shown:
        assert each.tiles is not None  # noqa: S101  (for the type checker)
        own = each.tiles["gpu"] == 0
        part = np.full(own.size, "Linear-1")
        part[own] = np.where(second_layer(each, 0)[each.tiles["row"][own]], "Linear-2", "Linear-1")
    plot.update(shown[0] if shown else None, part=part,
                capacity_bytes=picture.prediction.terms["capacity_bytes"],
                badges=f"{picture.moe.order}, {shown[0].provenance['badge']}; Linear-1 dark, "
                       "Linear-2 light" if shown else "Measure shows the run here")
    return shown


def speed_up(plot: plots.SpeedUp, picture: MoEPicture) -> list[Record]:
    """Draw wave over interleaved time against tokens, as predicted and as measured."""
    tokens = sorted({*TOKENS, picture.moe.tokens})
    layers = [_layer_or_reason(picture, {"tokens": n}) for n in tokens]
    by_law = [math.nan if isinstance(layer, str) else
              _law_speedup(layer, picture.machine, picture.tuning) for layer in layers]
    pairs = _pairs(picture.points("tokens", "order"))
    plot.update(
        {"tokens": tokens, "speedup_ratio": by_law, "rule_ratio": _rule(picture, layers)},
        {"tokens": [n for n, _ in pairs],
         "speedup_ratio": [wave.summary["total_s"] / other.summary["total_s"]
                           for wave, other in pairs.values()],
         "wave_s": [wave.summary["total_s"] for wave, _ in pairs.values()],
         "interleaved_s": [other.summary["total_s"] for _, other in pairs.values()],
         "badge": [badge for _, badge in pairs]},
        badges=picture.badge_text([wave for wave, _ in pairs.values()]))
    return [record for pair in pairs.values() for record in pair]


@functools.lru_cache(maxsize=4096)
def _law_speedup(layer: MoELayer, machine: MachineSpec, tuning: Tuning) -> float:
    """Return wave over interleaved time; kept, since a dragged slider asks for the same again."""
    wave, interleaved = analysis.predict_moe_map(
        layer, machine, calibration_of(machine, machine.n_sms), tuning.tile_m, tuning.tile_n,
        tuning.issue_depth, ORDERS, tuning).total_s
    return float(wave / interleaved)


def _pairs(points: Sequence[Point]) -> dict[tuple[int, str], tuple[Record, Record]]:
    """Return the last runs of both orders, by tokens and badge."""
    found: dict[tuple[int, str], dict[str, Record]] = {}
    for point in points:
        key = (point.values["tokens"], str(point.record.provenance["badge"]))
        found.setdefault(key, {})[point.values["order"]] = point.record
    return {key: (of["wave"], of["interleaved"]) for key, of in found.items() if len(of) == 2}


def order_map(plot: plots.OrderMap, picture: MoEPicture) -> list[Record]:
    """Draw the closed form over models and tokens, and what others measured of them."""
    weights = sorted(SHAPES, key=lambda name: SHAPES[name]["hidden"] * SHAPES[name]["intermediate"])
    changes: dict[str, Values] = {_HERE: {}, **{name: SHAPES[name] for name in weights}}
    cells = [(row, n, _layer_or_reason(picture, shape | {"tokens": n}))
             for row, shape in changes.items() for n in TOKENS]
    layers = [layer for _, _, layer in cells]
    plot.update(
        {"row": [row for row, _, _ in cells], "setting": [_short(n) for _, n, _ in cells],
         "speedup_ratio": _rule(picture, layers),
         "reason": [layer if isinstance(layer, str) else "" for layer in layers]},
        _told(), badges="PREDICTED; RECORDED: speed-ups, stalls of a tile (us)")
    return []


def _told() -> dict[str, list[str]]:
    """Return what others measured as marks on the map."""
    found = [(str(row["model"]), _short(int(row["tokens_per_rank"])),
              f"{row['wave_s'] / row['lag_s']:.2f}", "waves over Linear-2 trailing Linear-1",
              str(row["source"])) for row in catalog.table("h100_wave_lag")]
    for row in catalog.table("xstage_moe_stall"):
        name = next(name for name in SHAPES if name.startswith(str(row["model"])))
        found.append((name, _XSTAGE, f"{row['stall_measured_s'] * 1e6:.2f}",
                      f"{row['model']}: stall of a Linear-2 tile in waves, us; tokens not known",
                      str(row["source"])))
    least = next(row for row in catalog.table("xstage_constants")
                 if row["quantity"] == "speedup_interleaved_min")
    found.append((_LARGE, _XSTAGE, f"{least['value']:.2f}",
                  f"slowest of {least['condition']}; tokens not known", str(least["source"])))
    where, setting, words, what, says = (list(each) for each in zip(*found, strict=True))
    return {"row": where, "setting": setting, "label": words, "quantity": what, "reason": says,
            "badge": ["RECORDED"] * len(where)}


def _short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)


def _layer_or_reason(picture: MoEPicture, changed: Values) -> MoELayer | str:
    try:
        return picture.layer_at(changed)
    except XStageError as error:
        return str(error)


def _rule(picture: MoEPicture, layers: Sequence[MoELayer | str]) -> list[float]:
    """Return wave over interleaved time by the closed form, NaN where there is no layer."""
    runs = [i for i, layer in enumerate(layers) if isinstance(layer, MoELayer)]
    found = np.full(len(layers), math.nan)
    if runs:
        each = [analysis.two_layers(layer, picture.machine, picture.calibration, picture.tuning)
                for layer in layers if isinstance(layer, MoELayer)]
        stacked = law.TwoLayers(*(np.array(column) for column in zip(*each, strict=True)))
        found[runs] = 1.0 + law.compare_orders(stacked).gain_ratio
    return found.tolist()


def times(plot: plots.OrderTimes, picture: MoEPicture) -> list[Record]:
    """Draw predicted, measured and unfused total time of both orders."""
    runs = picture.here()
    bars = {}
    for order, found in picture.verdict.predictions.items():
        record = runs.get(order)
        bars[order] = {
            "predicted_s": found.summary["total_s"], "low_s": found.low["total_s"],
            "high_s": found.high["total_s"], "unfused": found.unfused,
            "measured_s": math.nan if record is None else record.summary["total_s"],
            "badge": "" if record is None else str(record.provenance["badge"])}
    terms = picture.prediction.terms
    plot.update(bars, drain_s=terms["remote_bytes"] / terms["drain_bytes_per_s"],
                badges=picture.badge_text(list(runs.values())))
    return list(runs.values())


def _shapes() -> dict[str, Values]:
    """Return the published shapes by model, and that of the layer timed in two orders."""
    row = catalog.table("h100_wave_lag")[0]
    timed = {"hidden": int(row["hidden"]), "intermediate": int(row["moe_intermediate"]),
             "experts": int(row["experts"]), "top_k": int(row["top_k"])}
    models = {name: {field: getattr(moe, field) for field in SHAPE}
              for name, moe in catalog.moe_models().items()}
    return models | {str(row["model"]): timed}


SHAPES = _shapes()


def _column(summaries: dict[str, dict[str, float]], order: str) -> list[str]:
    """Return one order's summary as text, with the speed-up where it is the interleaved one."""
    total = {each: summary["total_s"] for each, summary in summaries.items()}
    speedup = (f"{total['wave'] / total['interleaved']:.3f}"
               if order == "interleaved" and len(total) == len(ORDERS) else "")
    return [*(text(key, summaries[order][key]) for key in SUMMARY_KEYS), speedup]
