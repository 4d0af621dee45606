"""The MoE panel without a browser: both orders predicted, measured, beside what is published."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest

from xstage_lab import catalog
from xstage_lab.errors import InvalidValue, UnknownName
from xstage_lab.lab import MoESchedule
from xstage_lab.spec.moe import ORDERS

SMALL = {"tokens": 256, "hidden": 2048, "intermediate": 1024, "experts": 64, "top_k": 4}
LAYER = {"hidden": 4096, "intermediate": 2048, "experts": 288, "top_k": 8, "tokens": 2048}
TABS = ("Orders", "One SM", "Speed-up", "Map", "Times")


@pytest.fixture
def close() -> Iterator[list[MoESchedule]]:
    """Panels to close after the test, so that their workers end."""
    opened: list[MoESchedule] = []
    yield opened
    for each in opened:
        each.close()


def _open(close: list[MoESchedule], **settings) -> MoESchedule:
    close.append(MoESchedule(**settings))
    return close[-1]


def _data(made: MoESchedule, title: str) -> dict[str, np.ndarray]:
    made.visible = title
    return made.tabs[title].plot.data()


def _of(data: dict[str, np.ndarray], series: str, column: str) -> list:
    return data[column][data["series"] == series].tolist()


def test_moving_controls_predicts_both_orders_and_never_measures(close):
    """Every figure follows a change of the layer; nothing is measured, and all is PREDICTED."""
    made = _open(close, **SMALL)
    for title in TABS:
        before = {name: column.tolist() for name, column in _data(made, title).items()}
        made.controls.set(intermediate=made.controls.values()["intermediate"] + 512)
        after = {name: column.tolist() for name, column in _data(made, title).items()}
        assert title == "One SM" or str(after) != str(before)
    assert made.points == []
    assert made._worker is None
    assert "SIMULATED" not in made.strip.badges.value


def test_measure_runs_both_orders(close):
    """Measure shows both orders SIMULATED in the figures and the numbers, beside the law."""
    made = _open(close, **SMALL, wave_experts=8)
    predicted = _of(_data(made, "Orders"), "wave", "first_ratio")
    made.measure()
    assert [point.values["order"] for point in made.points] == list(ORDERS)
    data = _data(made, "Orders")
    assert _of(data, "wave", "first_ratio") != predicted
    for order in ORDERS:
        ends = [p.record.summary["total_s"] for p in made.points if p.values["order"] == order]
        assert ends[0] in _of(_data(made, "Times"), "times", "end_s")
        assert f"{order}, SIMULATED" in made.numbers.value
        assert abs(made.shown.by_order[order].error_ratio["total_s"]) < 0.15
    assert "SIMULATED" in made.strip.badges.value
    assert made.tabs["Orders"].plot._badges.text == "SIMULATED; GPU 0"


def test_one_sm_is_of_the_chosen_order_and_tells_layers_apart(close):
    """One SM shows the chosen order: both layers, all of Linear-1 of a wave before its Linear-2."""
    made = _open(close, **SMALL | {"tokens": 1024}, wave_experts=8,
                 min_lead_rows=512)
    made.measure()
    spans = {}
    for order in ORDERS:
        made.controls.set(order=order)
        data = _data(made, "One SM")
        mma = data["lane"] == "MMA"
        part, start = data["part"][mma], data["start_s"][mma]
        assert set(part) == {"Linear-1", "Linear-2"}
        spans[order] = start[part == "Linear-2"].min() - start[part == "Linear-1"].max()
    assert spans["wave"] > 0 > spans["interleaved"]


def test_sweep_measures_the_speed_up_against_tokens(close, monkeypatch):
    """Sweep runs both orders at each number of tokens, and a point is the ratio of their times."""
    from xstage_lab.lab import moe as panel_of_moe
    monkeypatch.setattr(panel_of_moe, "TOKENS", (64, 256))
    made = _open(close, **SMALL)
    made.sweep()
    assert len(made.points) == 4
    data = _data(made, "Speed-up")
    ratio = [wave / other for wave, other in zip(_of(data, "measured", "wave_s"),
                                                 _of(data, "measured", "interleaved_s"),
                                                 strict=True)]
    assert _of(data, "measured", "tokens") == [64, 256]
    assert _of(data, "measured", "speedup_ratio") == pytest.approx(ratio)
    assert set(_of(data, "measured", "badge")) == {"SIMULATED"}


def test_the_predicted_speed_up_is_that_of_the_verdict(close):
    """The curve at the chosen tokens is the speed-up in the words, and the closed form is near."""
    made = _open(close, **SMALL, machine="H100-SXM", wave_experts=8)
    data = _data(made, "Speed-up")
    at = _of(data, "predicted", "tokens").index(SMALL["tokens"])
    assert _of(data, "predicted", "speedup_ratio")[at] == pytest.approx(
        1 + made.shown.verdict.gain_ratio)


def test_published_orders_stand_beside_the_prediction(close):
    """The published layer on H100 replays as RECORDED, and the words say how much is explained."""
    made = _open(close, **LAYER, machine="H100-SXM", device="recorded")
    assert "1.43 times as fast" in made.words.value
    made.sweep()
    data = _data(made, "Speed-up")
    rows = catalog.table("h100_wave_lag")
    assert _of(data, "measured", "speedup_ratio") == pytest.approx(
        (rows["wave_s"] / rows["lag_s"]).tolist())
    assert set(_of(data, "measured", "badge")) == {"RECORDED"}
    made.controls.set(tokens=2000)
    assert "1.43 times" not in made.words.value
    made.measure()
    assert "tokens = 2048 (asked for: 2000)" in made.strip.message.value


def test_the_map_holds_what_others_measured(close):
    """Each published speed-up and stall stands on the map in its layer's row, as RECORDED."""
    made = _open(close, **SMALL)
    data = _data(made, "Map")
    labels = _of(data, "published", "label")
    assert {"1.45", "4.18", "0.06", "0.94"} <= set(labels)
    assert set(_of(data, "published", "badge")) == {"RECORDED"}
    assert all(_of(data, "published", "reason"))
    rows = dict(zip(labels, _of(data, "published", "row"), strict=True))
    assert (rows["1.45"], rows["4.18"], rows["0.06"]) == ("GLM-5.3-Flash", "DiT-MoE-XL",
                                                           "DSv4-Pro")


def test_the_map_shows_layers_that_cannot_run_with_the_reason(close):
    """A model whose experts do not divide by the GPUs is hatched and says why."""
    made = _open(close, **SMALL, n_gpus=16, machine="GB300-NVL")
    reasons = {reason.split("=")[0].strip(): row for row, reason in zip(
        _of(_data(made, "Map"), "infeasible", "row"),
        _of(_data(made, "Map"), "infeasible", "reason"), strict=True)}
    assert reasons["n_gpus"].startswith("DiT-MoE-XL")


@pytest.mark.parametrize(("settings", "says"), [
    ({"n_gpus": 7}, "n_gpus = 7"),
    ({"top_k": 65}, "top_k = 65"),
    ({"min_lead_rows": 10**6}, "min_lead_rows = 1000000"),
    ({"min_lead_rows": 0.5}, "min_lead_rows = 0.5"),
    ({"wave_experts": 9}, "wave_experts = 9"),
    ({"issue_depth": 8}, "KiB of shared memory"),
    ({"tokens": 0}, "tokens = 0"),
    ({"machine": "MI355X"}, "drain rate"),
])
def test_impossible_settings_say_why(close, settings, says):
    """What cannot run is not clamped: the last picture fades and the reason shows."""
    made = _open(close, **SMALL)
    possible = {name: made.controls.values()[name] for name in settings}
    made.controls.set(**settings)
    assert says in made.words.value
    assert "xstage-stale" in made.figures._dom_classes
    assert {name: made.controls.values()[name] for name in settings} == settings
    made.controls.set(**possible)
    assert "xstage-stale" not in made.figures._dom_classes


def test_routing_may_be_skewed_or_given(close):
    """Zipf and a given histogram change the prediction; one that does not add up is refused."""
    balanced = _open(close, **SMALL)
    total = 256 * 8 * 4
    rows = (total - 63 * 100, *(100,) * 63)
    given = _open(close, **SMALL, rows=rows, routing="given")
    balanced_s = balanced.shown.prediction.summary["total_s"]
    assert given.shown.prediction.summary["total_s"] > 1.2 * balanced_s
    assert given.shown.values["rows"] == rows
    given.controls.set(tokens=512)
    assert "must add up" in given.words.value
    balanced.controls.set(routing="zipf", zipf_exponent=1.2)
    assert balanced.shown.prediction.summary["total_s"] > 1.2 * balanced_s
    with pytest.raises(UnknownName, match="balanced"):
        MoESchedule(routing="given")


def test_skewed_routing_is_measured_and_drawn(close):
    """With skewed routing, where GPUs differ, both orders are measured and every figure drawn."""
    made = _open(close, **SMALL, routing="zipf", zipf_exponent=1.0)
    made.measure()
    for title in TABS:
        assert len(_data(made, title)["series"]) > 0
    assert "xstage-problem" not in made.words.value


def test_automatic_values_are_shown_in_empty_fields(close):
    """Empty fields say what is taken for them, and follow the tile."""
    made = _open(close, **SMALL)
    before = made.controls["min_lead_rows"].placeholder
    assert "automatic" in before
    made.controls.set(tile_m=64)
    assert made.controls["min_lead_rows"].placeholder != before
    assert made.controls["wave_experts"].placeholder.endswith("automatic")


def test_a_model_fills_in_its_shape_and_a_shape_finds_its_name(close):
    """Choosing a model sets its shape; a changed shape is called other."""
    made = _open(close)
    assert made.shape.value == "MiMo-V2.5"
    made.shape.value = "DSv4-Pro"
    assert made.controls.values()["hidden"] == 7168
    made.controls.set(hidden=7000)
    assert made.shape.value == "other"


@pytest.mark.parametrize(("settings", "kind"), [
    ({"model": "GLM-5.2"}, UnknownName),
    ({"order": "random"}, UnknownName),
    ({"tokens": "many"}, InvalidValue),
])
def test_bad_keywords_are_named(settings, kind):
    """A setting that cannot be shown at all is refused when the panel is made."""
    with pytest.raises(kind):
        MoESchedule(**settings)


def test_export_has_both_orders_and_all_parameters(close, tmp_path, monkeypatch):
    """Export of Orders writes both measured orders, every setting and where they come from."""
    monkeypatch.setenv("XSTAGE_CHROMIUM", "no-such-browser")
    made = _open(close, **SMALL)
    made.strip.folder.value = str(tmp_path)
    made.measure()
    made.export()
    about = json.loads((tmp_path / "orders.json").read_text())
    assert about["parameters"]["settings"] == made.controls.values()
    assert [each["parameters"]["order"] for each in about["parameters"]["records"]] == list(ORDERS)
    assert "SIMULATED" in about["provenance"]["badge"]
    table = (tmp_path / "orders.csv").read_text()
    assert all(f"\n{order}," in table for order in ORDERS)
