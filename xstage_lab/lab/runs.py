"""A small panel of the run log: list, filter, overlay, export, and delete only when asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import ipywidgets as w

from xstage_lab import experiment
from xstage_lab.errors import XStageError
from xstage_lab.lab import style
from xstage_lab.lab.strip import button
from xstage_lab.record import Record
from xstage_lab.runlog import Run, RunLog
from xstage_lab.units import display, text

#: The filter looks through the newest so many runs, and the list shows the newest matches.
MOST_SEARCHED, MOST_LISTED = 5_000, 300

Overlay = Callable[[list[tuple[Run, Record]]], str]


class Runs(w.VBox):
    """The runs of the log, the newest first.

    Parameters
    ----------
    path : str or Path, optional
        The log; the user's own if left out. It is opened by the first `refresh`.
    workload : str, optional
        List only runs of this workload.
    overlay : callable, optional
        Takes the runs to be drawn on figures, none to clear them; returns what it did in words.
    """

    def __init__(self, path: str | Path | None = None, *, workload: str | None = None,
                 overlay: Overlay | None = None) -> None:
        self._path, self._workload, self._draw = path, workload, overlay
        self._log: RunLog | None = None
        self._found: list[Run] = []
        self._condemned: tuple[int, ...] = ()
        self.words = w.Text(placeholder="filter: words of a line, such as H100 LIVE 2026-09",
                            continuous_update=False, layout=w.Layout(flex="1 1 200px"))
        self.list = w.SelectMultiple(rows=8, layout=w.Layout(width="auto"))
        self.list.add_class("xstage-runs")
        self.folder = w.Text("exports", layout=w.Layout(width="84px"),
                             tooltip="the folder that Export writes into")
        self.message = w.HTML()
        self._delete = button("Delete", "trash", self.delete, "", "delete the chosen runs for good")
        drawing = [] if overlay is None else [
            button("Overlay", "line-chart", self.overlay, "",
                   "draw the chosen runs on the figures"),
            button("Clear", "eraser", self.clear, "", "take overlaid runs off the figures")]
        row = w.Layout(align_items="center", flex_flow="row wrap")
        super().__init__([
            w.HBox([self.words, button("Refresh", "refresh", self.refresh, "",
                                       "read the log anew")], layout=row),
            self.list,
            w.HBox([*drawing, button("Export", "download", self.export, "",
                                     "write the chosen runs as CSV, JSON and record files"),
                    self.folder, self._delete], layout=row),
            self.message])
        self.words.observe(lambda _: self._list(), names="value")
        self.list.observe(lambda _: self._choose(), names="value")

    def refresh(self) -> None:
        """Read the log anew; what stays in the list stays chosen."""
        try:
            self._found = self._opened().runs(workload=self._workload, limit=MOST_SEARCHED)
        except XStageError as error:
            self._found = []
            self._list()
            self._warn(error)
            return
        self._list()

    def overlay(self) -> None:
        """Draw the chosen runs on the figures."""
        if self._draw is None or not self._some_chosen():
            return
        draw, log = self._draw, self._opened()
        chosen = [run for run in self._found if run.id in self.list.value]
        taken: list[tuple[Run, Record]] = []

        def done(error: XStageError | None) -> None:
            self._say(draw(taken))
            self._end(error)

        self._say("Reading ...")
        experiment.deliver(((run, log.record(run.id)) for run in chosen), taken.append, done)

    def clear(self) -> None:
        """Take overlaid runs off the figures."""
        if self._draw is not None:
            self._say(self._draw([]))

    def export(self) -> None:
        """Write the chosen runs into the folder."""
        if not self._some_chosen():
            return
        log, ids, folder = self._opened(), self.list.value, self.folder.value

        def write() -> Iterator[list[Path]]:
            yield log.export(ids, folder)

        def tell(files: list[Path]) -> None:
            self._say(f"Wrote runs.csv, runs.json and {len(files) - 2} record files in "
                      f"{files[0].parent.resolve()}.")

        self._say("Writing files ...")
        experiment.deliver(write(), tell, self._end)

    def delete(self) -> None:
        """Delete the chosen runs for good, once asked a second time."""
        if not self._some_chosen():
            return
        chosen = tuple(self.list.value)
        if chosen != self._condemned:
            self._condemned = chosen
            self._delete.button_style = "danger"
            self._warn(f"Press Delete again to delete {n_runs(len(chosen))} for good.")
            return
        try:
            n_deleted = self._opened().delete(chosen)
        except XStageError as error:
            self._warn(error)
            return
        self.refresh()
        self._say(f"Deleted {n_runs(n_deleted)}.")

    def close(self) -> None:
        """Close the log and the widgets."""
        if self._log is not None:
            self._log.close()
        super().close()

    def _opened(self) -> RunLog:
        if self._log is None:
            self._log = RunLog(self._path)
        return self._log

    def _list(self) -> None:
        words, chosen = self.words.value.lower().split(), set(self.list.value)
        lines = [(line(run), run.id) for run in self._found]
        matches = [(words_of, number) for words_of, number in lines
                   if all(word in words_of.lower() for word in words)]
        self.list.value = ()  # the page must not look for the old choice in the new list
        self.list.options = matches[:MOST_LISTED]
        self.list.value = [number for _, number in matches[:MOST_LISTED] if number in chosen]
        more = f", the newest {MOST_LISTED} are listed" if len(matches) > MOST_LISTED else ""
        self._say(f"{n_runs(len(matches))} of {len(lines):,}{more}.")

    def _some_chosen(self) -> bool:
        if not self.list.value:
            self._warn("Choose runs in the list first; Ctrl or Shift chooses several.")
        return bool(self.list.value)

    def _choose(self) -> None:
        """Forget that other runs were to be deleted; show all of a line that may be cut off."""
        self._condemned = ()
        self._delete.button_style = ""
        chosen = [run for run in self._found if run.id in self.list.value]
        self._say(line(chosen[0]) if len(chosen) == 1 else f"{n_runs(len(chosen))} chosen.")

    def _end(self, error: XStageError | None) -> None:
        if error is not None:
            self._warn(error)

    def _say(self, words: str) -> None:
        self.message.value = style.note(words)

    def _warn(self, words: object) -> None:
        self.message.value = style.problem(str(words))


class FoldedRuns(w.Accordion):
    """The runs of the user's log, folded away; the log is read while they are unfolded."""

    def __init__(self, *, workload: str, overlay: Overlay) -> None:
        self._runs = Runs(workload=workload, overlay=overlay)
        super().__init__([self._runs], titles=["run log"])
        self.add_class("xstage-folded")
        self.observe(lambda _: self.refresh(), names="selected_index")

    def refresh(self) -> None:
        """Read the log anew if the list is to be seen."""
        if self.selected_index is not None:
            self._runs.refresh()

    def close(self) -> None:
        """Close the log and the widgets."""
        self._runs.close()
        super().close()


def line(run: Run) -> str:
    """Return a run in one line: number, date, origin, total time, parameters."""
    about = (f"{name}={text(name, value) if display(name).unit else value}"
             for name, value in run.parameters.items()
             if value is not None and name != "workload")
    when = run.date[:16].replace("T", " ")
    return " · ".join([f"#{run.id}", when, run.badge, run.machine, run.workload,
                       f"total {text('total_s', run.total_s)}", " ".join(about)])


def n_runs(n: int) -> str:
    """Return a number of runs in words."""
    return f"{n:,} run{'' if n == 1 else 's'}"
