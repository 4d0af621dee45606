"""The button *Find the best*: the tuner behind a panel, and what it found, in words."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import ipywidgets as w

from xstage_lab import analysis
from xstage_lab.analysis import Answer, Calibration, Choice, Space, Trial
from xstage_lab.errors import XStageError
from xstage_lab.lab import style
from xstage_lab.lab.panel import Panel
from xstage_lab.lab.picture import Values
from xstage_lab.lab.strip import button
from xstage_lab.spec import MachineSpec, Workload


class Asked(NamedTuple):
    """What is searched."""

    workload: Workload
    machine: MachineSpec
    calibration: Calibration
    space: Space


class Finding(w.VBox):
    """What a search found, and a button that sets the controls to it.

    Parameters
    ----------
    use : callable
        What the button does; takes nothing.
    """

    def __init__(self, use: Callable[[], None]) -> None:
        self._words = w.HTML()
        self.offer = button("Set the controls", "check", use, "success",
                            "show the best, and the settings that it was found for", "140px")
        super().__init__([self.offer, self._words])
        self.add_class("xstage-finding")
        self.hide()

    def hide(self) -> None:
        """Show nothing."""
        self.layout.display = "none"

    def show(self, answer: Answer, offered: bool) -> None:
        """Show an answer, and the button where it is `offered`."""
        self._words.value = style.words([answer.explain[0], answer.fuse, *answer.explain[1:]])
        self.offer.layout.display = "" if offered else "none"
        self.layout.display = ""


class SearchingPanel(Panel):
    """A panel with the button *Find the best*; it fills in what raises `NotImplementedError`.

    The controls are set to what was found; where they were moved meanwhile, or the search was
    stopped, it is offered.
    """

    search_figure = ""  # title of the tab that shows what the search measures

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        #: What the last search answered, and the settings that it was asked for.
        self.answer: Answer | None = None
        self._searched: Values = {}
        self.finding = Finding(self.use_best)
        self.strip.add_starter(button(
            "Find the best", "search", self.find_best, "",
            "search for the fastest configuration, measuring the promising few", "122px"))
        self.strip.children = [*self.strip.children, self.finding]

    def plan_search(self, values: Values) -> Asked:
        """Return what Find the best searches."""
        raise NotImplementedError

    def settings_of(self, choice: Choice) -> Values:
        """Return the settings of the controls that a candidate stands for."""
        raise NotImplementedError

    def find_best(self) -> None:
        """Search for the best, on the device."""
        if self._running:
            return
        try:
            values = self.controls.values()
            asked = self.plan_search(values)
            worker, log = self._ready(values)
        except XStageError as error:
            self.strip.warn(str(error))
            return

        def points() -> Generator[Trial, None, None]:
            self.answer = yield from analysis.search(
                *asked, device=worker, log=log, stop=self._stopping.is_set)

        def take(trial: Trial) -> None:
            if trial.record.parameters["stores"] == "remote":
                self.take(values | self.settings_of(trial.choice), trial.record)
            self._count(trial.n_measured, trial.budget, f" at most: {trial.choice.label()}")

        self.answer, self._searched = None, values
        self.finding.hide()
        self._deliver(points(), take, self._found,
                      "The law predicts every configuration")
        self.visible = self.search_figure

    def use_best(self) -> None:
        """Set the controls to the best that was found, and to what it was found for."""
        if self.answer is not None:
            self.controls.set(**self._searched | self.settings_of(self.answer.best.choice))
            self.finding.offer.layout.display = "none"

    def _found(self, error: XStageError | None) -> None:
        self._finish(error)
        if self.answer is None or error is not None:
            return
        moved, stopped = self.controls.values() != self._searched, self._stopping.is_set()
        self.finding.show(self.answer, moved or stopped)
        told = ("The controls were moved meanwhile and stay where they are." if moved else
                "This is the best so far; the controls stay where they are." if stopped else
                "The controls are set to the best.")
        ended = "Stopped" if stopped else "Done"
        self.strip.say(f"{ended}: {self.answer.n_measured} runs. {told}")
        if not (moved or stopped):
            self.use_best()
