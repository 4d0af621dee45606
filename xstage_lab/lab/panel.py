"""What all panels share: controls left, figures right, numbers, words and the strip below.

Moving a control redraws the prediction; only Measure and Sweep start the device, in a worker
process. Settings that cannot run keep the last picture, visibly stale, and say why.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import ipywidgets as w
from bokeh.document import Document
from bokeh.models import Plot as BokehPlot
from bokeh.models.annotations import Legend

from xstage_lab import analysis, experiment
from xstage_lab.devices.base import Device
from xstage_lab.doctor import package_problems
from xstage_lab.errors import XStageError, require_choice
from xstage_lab.export import Exported, export
from xstage_lab.lab import style
from xstage_lab.lab.coalesce import Coalescer
from xstage_lab.lab.controls import Controls
from xstage_lab.lab.live_figure import LiveFigure, load_bokehjs
from xstage_lab.lab.picture import Picture, Point, Values
from xstage_lab.lab.runs import FoldedRuns, n_runs
from xstage_lab.lab.strip import Strip
from xstage_lab.plots import Plot, Timeline
from xstage_lab.record import Record, provenance
from xstage_lab.runlog import Run, RunLog, as_logged
from xstage_lab.schedule import Program
from xstage_lab.worker import Worker

#: Per-tile times of old points are let go beyond this; their summaries stay.
MOST_TILE_BYTES = 256 * 2**20
FIGURE_HEIGHT = 400  # pixels, the same in all tabs so that nothing below them jumps


class Tab(NamedTuple):
    """A plot, and the function that draws a picture into it and returns the records it shows."""

    plot: Plot
    draw: Callable[[Any, Any], list[Record]]


class Planned(NamedTuple):
    """A measurement to be made and its settings."""

    values: Values
    program: Program


class Panel(w.VBox):
    """Base of the panels; a panel fills in what raises `NotImplementedError`.

    Parameters
    ----------
    controls : Controls
    left : sequence of Widget
        The controls as they stand, with their headings.
    tabs : dict of str to Tab
        By title, in order.
    settings : dict
        Settings by name to begin with, SI.
    """

    workload = ""  # name of the specs whose runs the figures can show
    figure_height = FIGURE_HEIGHT
    sweep_figure = ""  # title of the tab that shows what Sweep measures; empty: any may
    _worker: Worker | None = None
    _log: RunLog | None = None
    runs: FoldedRuns | None = None

    def __init__(self, controls: Controls, left: Sequence[w.Widget], tabs: dict[str, Tab],
                 settings: Values) -> None:
        self._running, self._n_taken = False, 0
        self._failed: XStageError | None = None
        self._exported: list[Exported] = []
        self._stopping = threading.Event()
        controls.set(**settings)
        self.controls, self.tabs = controls, tabs
        self.points: list[Point] = []
        self.comparisons: list[analysis.Comparison] = []
        self.overlaid: list[Record] = []
        self.runs = FoldedRuns(workload=self.workload, overlay=self.overlay)
        self.shown: Picture | None = None
        self._records: list[Record] = []
        self._redraw = Coalescer(self._draw)
        self.figures = w.Tab()
        self.figures.add_class("xstage-tabs")
        self.numbers, self.words = w.HTML(), w.HTML(layout=w.Layout(min_height="96px"))
        self.strip = Strip(measure=self.measure, sweep=self.sweep, stop=self.stop,
                           export=self.export)
        right = w.VBox([self.figures, self.strip, self.words, self.numbers],
                       layout=w.Layout(flex="1 1 0", min_width="0"))
        box = w.VBox(list(left), layout=w.Layout(flex="0 0 330px", padding="0 12px 0 0"))
        misfits = [style.problem(f"{p.what} {p.remedy}") for p in package_problems()]
        super().__init__([w.HTML(style.STYLE + "".join(misfits)), w.HBox([box, right]),
                          self.runs], layout=w.Layout(width="100%"))
        self.add_class("xstage-panel")
        controls.observe(self._redraw)
        self.figures.observe(self._redraw, names="selected_index")
        self._draw()
        self._open_figures()
        self._say_once_free("Measure runs these settings, Sweep a series of them.")

    def picture(self, values: Values) -> Picture:
        """Return what the figures show for `values`; raises `XStageError` where impossible."""
        raise NotImplementedError

    def device(self, values: Values) -> Callable[[], Device]:
        """Return a picklable maker of the device that Measure and Sweep run on."""
        raise NotImplementedError

    def plan_measure(self, values: Values) -> Iterable[Planned]:
        """Return what Measure runs."""
        raise NotImplementedError

    def plan_sweep(self, values: Values) -> Iterable[Planned]:
        """Return what Sweep runs."""
        raise NotImplementedError

    @property
    def visible(self) -> str:
        """Title of the tab that is shown."""
        return list(self.tabs)[self.figures.selected_index or 0]

    @visible.setter
    def visible(self, title: str) -> None:
        require_choice("figure", title, self.tabs)
        self.figures.selected_index = list(self.tabs).index(title)

    def points_at(self, values: Values, *free: str) -> list[Point]:
        """Return the points measured with `values`, whatever the settings named in `free`."""
        fixed = values.keys() - set(free)
        return [p for p in self.points if all(p.values[name] == values[name] for name in fixed)]

    def possible(self, series: Iterable[Values]) -> list[tuple[Values, Any]]:
        """Return those of `series` that can run, and their pictures; raises where none can."""
        found: list[tuple[Values, Any]] = []
        reasons: list[XStageError] = []
        for values in series:
            try:
                found.append((values, self.picture(values)))
            except XStageError as error:  # such points are drawn as missing
                reasons.append(error)
        if reasons and not found:
            raise reasons[0]
        return found

    def measure(self) -> None:
        """Run the current settings on the device."""
        self._start(self.plan_measure)

    def sweep(self) -> None:
        """Run a series of settings on the device, and show the figure that they appear in."""
        if self._start(self.plan_sweep) and self.sweep_figure:
            self.visible = self.sweep_figure

    def stop(self) -> None:
        """End the running measurement; the points that are there stay."""
        self._stopping.set()
        if self._worker is not None:
            self._worker.stop()

    def close(self) -> None:
        """End the worker and close the widgets."""
        if self._worker is not None:
            self._stopping.set()
            self._worker.close()
        for part in (self._log, self.runs):
            if part is not None:
                part.close()
        super().close()

    def export(self) -> None:
        """Write the visible figure, its data and its parameters into the folder of the strip."""
        if self.shown is None:
            self.strip.warn("There is no figure yet: choose settings that are possible.")
            return
        plot, picture = self.tabs[self.visible].plot, self.shown
        # The thread that writes gets a copy, so that the figure may change meanwhile.
        root: Any = plot.figure
        copy: Any = Document.from_json(root.document.to_json()).roots[0]
        about = {"panel": type(self).__name__, "figure": self.visible,
                 "settings": picture.values, "machine": picture.machine,
                 "calibration": picture.calibration,
                 "records": [{"parameters": r.parameters, "provenance": r.provenance}
                             for r in self._records]}
        badges = picture.badges(self._records)
        origin = provenance(", ".join(dict.fromkeys(name for name, _ in badges)),
                            ", ".join(dict.fromkeys(["law", *(
                                str(r.provenance["device"]) for r in self._records)])),
                            "; ".join(f"{name}: {words}" for name, words in badges))

        traced = self._records[0] if isinstance(plot, Timeline) and self._records else None

        def write(data: Any, folder: str) -> Iterator[Exported]:
            yield export(copy, folder, plot.name, data, about, origin, traced)

        self.strip.set_exporting(True)
        self.strip.say("Writing files ...")
        experiment.deliver(write(plot.data(), self.strip.folder.value), self._tell_exported,
                           self._end_export)

    def export_all(self, folder: str) -> list[Exported]:
        """Measure the current settings and export every figure, with no event loop running.

        Raises
        ------
        XStageError
            If the settings are impossible, or the measurement or the export fails.
        """
        self.picture(self.controls.values())
        self.strip.folder.value, self._failed, self._exported = folder, None, []
        self.measure()
        for index in range(len(self.tabs)):
            self.figures.selected_index = index
            self.export()
            if self._failed is not None:
                raise self._failed
        return self._exported

    def _tell_exported(self, written: Exported) -> None:
        self._exported.append(written)
        names = ", ".join(path.name for path in written.files)
        self.strip.say(" ".join([f"Wrote {names} in {written.files[0].parent.resolve()}.",
                                 *written.notes]))

    def _end_export(self, error: XStageError | None) -> None:
        self.strip.set_exporting(False)
        self._failed = error
        if error is not None:
            self.strip.warn(str(error))

    def _draw(self) -> None:
        """Bring the visible tab, the numbers and the words up to date."""
        tab = self.tabs[self.visible]
        try:
            picture = self.picture(self.controls.values())
            records = tab.draw(tab.plot, picture)
        except XStageError as error:
            self._show_stale(error)
            return
        self.shown, self._records = picture, records
        for part in (self.figures, self.numbers):
            part.remove_class("xstage-stale")
        self.numbers.value = picture.table()
        self.words.value = style.words([*picture.explanation(), *self._verdict()])
        self.strip.badges.value = style.badge_line(picture.badges(records))

    def _verdict(self) -> list[str]:
        """Judge the law by all runs of this panel, once there are enough of them."""
        try:
            return [analysis.judge(self.comparisons).words]
        except XStageError:
            return []

    def _open_figures(self) -> None:
        """Put the figures on the page, each with its picture in it."""
        load_bokehjs()
        for tab in self.tabs.values():
            legends: Any = tab.plot.figure.select({"type": Legend})
            for legend in legends:
                if legend.ncols == 3:  # the third would be cut off beside the controls
                    legend.ncols = 2
            root: Any = tab.plot.figure
            parts: list[Any] = [root] if isinstance(root, BokehPlot) else root.children
            whole = sum(part.height for part in parts)
            for part in parts:
                part.height = round(part.height * self.figure_height / whole)
            if self.shown is not None:
                tab.draw(tab.plot, self.shown)
        self.figures.children = [LiveFigure(tab.plot.figure) for tab in self.tabs.values()]
        self.figures.titles = list(self.tabs)

    def _show_stale(self, error: XStageError) -> None:
        for part in (self.figures, self.numbers):
            part.add_class("xstage-stale")
        kept = "" if self.shown is None else " The figures are of the last possible settings."
        self.words.value = style.problem(f"{error}{kept}")

    def _say_once_free(self, text: str) -> None:
        """Say `text` once the running cell has finished, and until then that points wait for it."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self.strip.say(text)
            return
        self.strip.say("Measured points appear once the running cell has finished.")
        loop.call_soon(self.strip.say, text)

    def _start(self, plan: Callable[[Values], Iterable[Planned]]) -> bool:
        """Measure what is planned; return whether that has begun."""
        if self._running:
            return False
        try:
            values = self.controls.values()
            planned = list(plan(values))
            worker, log = self._ready(values)
        except XStageError as error:
            self.strip.warn(str(error))
            return False
        awaited = iter(planned)

        def take(record: Record) -> None:
            self.take(next(awaited).values, record)
            self._count(self._n_taken + 1, len(planned))

        self._deliver(experiment.run(worker, [each.program for each in planned],
                                     stop=self._stopping.is_set, log=log),
                      take, self._finish, f"0 of {len(planned)} runs")
        return True

    def _ready(self, values: Values) -> tuple[Worker, RunLog | None]:
        """Return the worker with the chosen device in it, and the log of what it measures."""
        make_device = self.device(values)
        self._log = self._log or RunLog()
        self._worker = self._worker or Worker(make_device)
        self._worker.use(make_device)
        return self._worker, None if values.get("device") == "recorded" else self._log

    def _deliver(self, points: Iterator[Any], take: Callable[[Any], None],
                 finish: Callable[[XStageError | None], None], words: str) -> None:
        """Hand points to `take` as they are measured; `finish` ends it."""
        self._stopping.clear()
        self._running, self._n_taken = True, 0
        self.strip.set_running(True)
        self.strip.bar.value = 0.0
        self._say_once_free(f"{words}; the measuring process gets ready.")
        experiment.deliver(points, take, finish)

    def _count(self, n: int, most: int, words: str = "") -> None:
        """Show that `n` of at most so many runs were made."""
        self._n_taken = n
        self.strip.bar.value = n / most
        self.strip.say(f"{n} of {most} runs{words}.")

    def take(self, values: Values, record: Record) -> None:
        """Keep a measurement and redraw."""
        self.points.append(Point(values, record))
        found = self.picture(values).comparison
        if found is not None:
            self.comparisons.append(found)
        self._forget_tiles()
        self._redraw()

    def overlay(self, runs: list[tuple[Run, Record]]) -> str:
        """Draw runs of the log on the figures in place of those before; say what was done."""
        self.overlaid = [as_logged(run, record) for run, record in runs
                         if record.parameters.get("stores") == "remote"]
        self._redraw()
        left_out = f"; {n} that stored nothing remote left out" if (
            n := len(runs) - len(self.overlaid)) else ""
        return f"{n_runs(len(self.overlaid))} overlaid{left_out}."

    def _forget_tiles(self) -> None:
        left = MOST_TILE_BYTES
        for i in reversed(range(len(self.points))):
            record = self.points[i].record
            left -= 0 if record.tiles is None else record.tiles.nbytes
            if left < 0 and record.tiles is not None and i < len(self.points) - 1:
                self.points[i] = self.points[i]._replace(
                    record=dataclasses.replace(record, tiles=None))

    def _finish(self, error: XStageError | None) -> None:
        self._running = False
        self._failed = error
        self.strip.set_running(False)
        if self.runs is not None:
            self.runs.refresh()
        if error is not None:
            self.strip.warn(f"{error} {self._n_taken} runs were made.")
        elif self._stopping.is_set():
            self.strip.say(f"Stopped after {self._n_taken} runs; nothing is running.")
        else:
            self.strip.say(f"Done: {self._n_taken} runs.")
