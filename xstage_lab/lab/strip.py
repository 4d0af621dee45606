"""The strip below a panel: what the numbers are, how far measuring has come, and its buttons."""

from __future__ import annotations

from collections.abc import Callable

import ipywidgets as w

from xstage_lab.lab.style import note, problem


class Strip(w.VBox):
    """Badges, progress, a message, and the buttons Measure, Sweep, Stop and Export.

    Parameters
    ----------
    measure, sweep, stop, export : callable
        What the buttons do; take nothing.
    """

    def __init__(self, *, measure: Callable[[], None], sweep: Callable[[], None],
                 stop: Callable[[], None], export: Callable[[], None]) -> None:
        self.badges = w.HTML(layout=w.Layout(flex="1 1 auto", min_height="44px"))
        self.message = w.HTML(layout=w.Layout(min_height="40px"))
        self.bar = w.FloatProgress(min=0.0, max=1.0, layout=w.Layout(flex="1 1 40px", width="40px",
                                                               max_width="240px"))
        self.folder = w.Text("exports", layout=w.Layout(width="84px"),
                             tooltip="the folder that Export writes into")
        self._measure = button("Measure", "play", measure, "primary",
                                "run these settings on the device")
        self._sweep = button("Sweep", "signal", sweep, "",
                              "run a series of settings on the device")
        self._stop = button("Stop", "stop", stop, "warning", "end the running measurement")
        self._export = button("Export", "download", export, "",
                               "write the visible figure, its data and its parameters to files")
        self._starters = [self._measure, self._sweep]
        self._row = w.HBox([*self._starters, self._stop, self.bar, self._export, self.folder],
                           layout=w.Layout(align_items="center", flex_flow="row wrap"))
        super().__init__([self._row, self.badges, self.message])
        self.set_running(False)

    def add_starter(self, made: w.Button) -> None:
        """Add a button that starts measurements, and is disabled while others run."""
        self._row.children = [*self._starters, made, *self._row.children[len(self._starters):]]
        self._starters.append(made)

    def set_running(self, running: bool) -> None:
        """Enable the buttons that make sense while measuring, or while not."""
        for starter in self._starters:
            starter.disabled = running
        self._stop.disabled = not running

    def set_exporting(self, exporting: bool) -> None:
        """Disable Export while files are being written."""
        self._export.disabled = exporting

    def say(self, text: str) -> None:
        """Show `text` as the message."""
        self.message.value = note(text)

    def warn(self, text: str) -> None:
        """Show `text` as a message that stands out."""
        self.message.value = problem(text)


def button(words: str, icon: str, pressed: Callable[[], None], style: str, hint: str,
           width: str = "94px") -> w.Button:
    """Return a button that calls `pressed`."""
    made = w.Button(description=words, icon=icon, button_style=style, tooltip=hint,
                    layout=w.Layout(width=width, min_width=width))
    made.on_click(lambda _: pressed())
    return made
