"""The controls of a panel: widgets show the units of the field, values come out in SI."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ipywidgets as w

from xstage_lab.errors import InvalidValue, UnknownName, require_choice, require_number
from xstage_lab.units import display

#: What a list of named settings shows where the fields hold something else.
OTHER = "other"
_STYLE = {"description_width": "128px"}
_WIDE = {"width": "100%", "margin": "1px 0"}


def _label(name: str, words: str) -> str:
    unit = display(name).unit
    return f"{words} ({unit})" if unit else words


def _options(name: str, words: str, hint: str) -> dict[str, Any]:
    return {"description": _label(name, words), "tooltip": hint,
            "style": _STYLE, "layout": w.Layout(**_WIDE)}


def whole(name: str, words: str, value: int, low: int, high: int, step: int = 1,
          hint: str = "") -> w.IntSlider:
    """Return a slider over whole numbers; it may reach beyond what a machine can do."""
    return w.IntSlider(value, low, high, step, **_options(name, words, hint))


def real(name: str, words: str, value: float, low: float, high: float, step: float,
         hint: str = "") -> w.FloatSlider:
    """Return a slider; bounds and step in the unit that is shown, `value` in SI."""
    return w.FloatSlider(value * display(name).scale, min=low, max=high, step=step,
                         readout_format=".2f", **_options(name, words, hint))


def log(name: str, words: str, value: float, low: float, high: float,
        hint: str = "") -> w.FloatLogSlider:
    """Return a slider over powers of two; bounds in the unit that is shown, `value` in SI."""
    return w.FloatLogSlider(value * display(name).scale, base=2, min=math.log2(low),
                            max=math.log2(high), step=0.125, readout_format=".4g",
                            **_options(name, words, hint))


class Count(w.FloatText):
    """A field for a whole number that takes any, for the workload to refuse: 8192.5 is no 81925."""


def field(name: str, words: str, value: float, hint: str = "") -> w.FloatText:
    """Return a field for any number, possible or not; `value` in SI."""
    kind = Count if isinstance(value, int) else w.FloatText
    return kind(value * display(name).scale, **_options(name, words, hint))


def optional(name: str, words: str, hint: str = "") -> w.Text:
    """Return a field that may stay empty, which is None."""
    return w.Text("", placeholder="not known", continuous_update=False,
                  **_options(name, words, hint))


class Words(w.Text):
    """A field for words."""


def words(name: str, label: str, value: str, hint: str = "") -> Words:
    """Return a field for words, such as the name of a folder."""
    return Words(value, placeholder=hint, continuous_update=False, **_options(name, label, hint))


def choice(name: str, words: str, value: str, options: Iterable[str], hint: str = "") -> w.Dropdown:
    """Return a drop-down list of names."""
    return w.Dropdown(options=list(options), value=value, **_options(name, words, hint))


def section(words: str) -> w.HTML:
    """Return a small heading between controls."""
    return w.HTML(f'<div class="xstage-section">{words}</div>')


class Controls:
    """The named controls of a panel.

    Parameters
    ----------
    **widgets
        A widget per setting; the name's suffix says the SI unit of the setting.
    """

    def __init__(self, **widgets: w.Widget) -> None:
        self.widgets = widgets

    def __getitem__(self, name: str) -> w.Widget:
        return self.widgets[name]

    def values(self) -> dict[str, Any]:
        """Return every setting: SI, bytes and counts as whole numbers."""
        return {name: self._value(name) for name in self.widgets}

    def _value(self, name: str) -> Any:
        value = self.widgets[name].value
        if isinstance(self.widgets[name], w.Text) and not isinstance(self.widgets[name], Words):
            value = _number_or_none(name, value)
        if value is None or isinstance(value, str | int):
            return value
        if isinstance(self.widgets[name], Count) and value.is_integer():
            return int(value)
        si = value / display(name).scale
        return round(si) if name.endswith("_bytes") and math.isfinite(si) else si

    def set(self, **settings: Any) -> None:
        """Set settings by name, SI; a slider grows where the value lies outside it.

        Raises
        ------
        UnknownName
            If there is no such setting or choice; names the nearest.
        InvalidValue
            If it is not a number where one is needed.
        """
        for name, value in settings.items():
            if name not in self.widgets:
                raise UnknownName("setting", name, self.widgets)
            widget = self.widgets[name]
            if isinstance(widget, w.Dropdown):
                require_choice(name, value, [str(option) for option in widget.options])
                widget.value = value
            elif isinstance(widget, Words):
                widget.value = str(value)
            elif isinstance(widget, w.Text) and value is None:
                widget.value = ""
            else:
                require_number(name, value)
                self._show(name, widget, value)

    def _show(self, name: str, widget: w.Widget, value: float) -> None:
        shown = value * display(name).scale
        if isinstance(widget, w.IntSlider | Count):
            require_number(name, value, integer=True)
            shown = int(value)
        if isinstance(widget, w.FloatLogSlider):
            if shown <= 0.0:
                raise InvalidValue(name, value, "numbers above 0")
            widget.min = min(widget.min, math.log2(shown))
            widget.max = max(widget.max, math.log2(shown))
        elif isinstance(widget, w.IntSlider | w.FloatSlider):
            widget.min, widget.max = min(widget.min, shown), max(widget.max, shown)
        widget.value = f"{shown:.12g}" if isinstance(widget, w.Text) else shown

    def observe(self, changed: Callable[[object], None]) -> None:
        """Call `changed` after every change of a value."""
        for widget in self.widgets.values():
            widget.observe(changed, names="value")


def tie_names(names: w.Dropdown, controls: Controls,
              named: Mapping[str, Mapping[str, Any]]) -> None:
    """Let a drop-down list set the settings that it names, and show the name of those set.

    Parameters
    ----------
    names : Dropdown over the names and `OTHER`
    named : settings by name
    """
    def choose(change: Any) -> None:
        if change["new"] != OTHER:
            controls.set(**named[change["new"]])

    def show(_change: object = None) -> None:
        shown = {name: widget.value for name, widget in controls.widgets.items()}
        names.value = next((name for name, settings in named.items()
                            if settings.items() <= shown.items()), OTHER)

    show()
    names.observe(choose, names="value")
    controls.observe(show)


def _number_or_none(name: str, text: str) -> float | None:
    if not text.strip():
        return None
    try:
        return float(text)
    except ValueError:
        raise InvalidValue(name, text, "a number, or empty", display(name).unit) from None
