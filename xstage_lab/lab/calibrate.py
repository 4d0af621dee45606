"""The panel of notebook 02: the law's parameters of a device, with intervals and a verdict."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ipywidgets as w

from xstage_lab import analysis, experiment
from xstage_lab.analysis import Calibration, Sample
from xstage_lab.devices.base import Device
from xstage_lab.errors import FileRejected, XStageError
from xstage_lab.export import Exported, export
from xstage_lab.lab import calibration_figures as draw
from xstage_lab.lab import controls, style
from xstage_lab.lab.controls import Controls, section
from xstage_lab.lab.device import device_controls, live_machines, maker, not_offered
from xstage_lab.lab.live_figure import LiveFigure, load_bokehjs
from xstage_lab.lab.machine import chosen_machine, machine_controls, path_fields, show_published
from xstage_lab.lab.strip import button
from xstage_lab.plots.calibration import Fitted
from xstage_lab.record import provenance
from xstage_lab.runlog import RunLog
from xstage_lab.units import text
from xstage_lab.worker import Worker

_READY = "Calibrate runs four experiments with bursts; nothing of a workload enters."


class Figure(NamedTuple):
    """A plot and the function that draws samples and fit into it."""

    plot: Fitted
    draw: Callable[[Fitted, list[Sample], Calibration | None, str], None]


class Calibrate(w.VBox):
    """Measure t0, r_SM, R and Q of a device, see how well, and save them.

    Parameters
    ----------
    **settings
        Any control by name, SI: `device` (`simulated`, `sockets`, `cuda:host`, ... where they
        work), `machine`, `n_producers`,
        `burst_bytes`, `repeats`, and the parameters of the store path.

    Raises
    ------
    UnknownName, InvalidValue
        If a setting is unknown, or no number where one is needed.
    """

    def __init__(self, **settings: Any) -> None:
        self._worker: Worker | None = None
        self._log: RunLog | None = None
        self._stopping = threading.Event()
        self._running, self._badge = False, ""
        load_bokehjs()
        made = {
            **device_controls(("simulated",)),
            **machine_controls(settings.get("machine", "B200-SXM")),
            "n_producers": controls.optional("n_producers", "producers K", "empty: every SM"),
            "burst_bytes": controls.log("burst_bytes", "burst B", 32 * 1024, 1, 1024,
                                        "of the zero-gap trains"),
            "repeats": controls.whole("repeats", "repeats", 3, 1, 20, hint="of every train"),
        }
        made["n_producers"].placeholder = "every SM"
        show_published(made)
        made["machine"].observe(lambda _: show_published(made), names="value")
        self.controls = Controls(**made)
        self.controls.set(**settings)
        self.samples: list[Sample] = []
        self.calibration: Calibration | None = None
        self.plots = _figures()
        self.figures = w.Tab([LiveFigure(f.plot.figure) for f in self.plots.values()],
                             titles=list(self.plots),
                             layout=w.Layout(flex="1 1 0", min_width="0"))
        self.figures.add_class("xstage-tabs")
        self.result, self.message, self.overlay = w.HTML(), w.HTML(), w.HTML()
        left = [section("device"), made["device"], not_offered(), made["machine"],
                path_fields(made),
                section("trains"), *(made[n] for n in ("n_producers", "burst_bytes", "repeats"))]
        super().__init__([
            w.HTML(style.STYLE),
            w.HBox([w.VBox(left, layout=w.Layout(flex="0 0 300px", padding="0 10px 0 0")),
                    w.VBox([self.figures, self._strip(), self.message, self.result,
                            self.overlay], layout=w.Layout(flex="1 1 0", min_width="0"))],
                   layout=w.Layout(width="100%"))])
        self.add_class("xstage-panel")
        self._draw()
        self._set_running(False)
        self.message.value = style.note(_READY)
        self.compare()

    def _strip(self) -> w.HBox:
        self.bar = w.FloatProgress(min=0.0, max=1.0,
                                   layout=w.Layout(flex="1 1 40px", max_width="200px"))
        self.name = w.Text("", placeholder="name", layout=w.Layout(width="150px"))
        self.folder = w.Text("calibrations", layout=w.Layout(width="110px"),
                             tooltip="the folder that Save and Export write into")
        self._buttons = {
            "start": button("Calibrate", "play", self.measure, "primary", "run the experiments"),
            "stop": button("Stop", "stop", self.stop, "warning", "end them"),
            "save": button("Save", "save", self.save, "", "keep this calibration under its name"),
            "export": button("Export", "download", self.export, "",
                             "write the visible figure, its data and the parameters")}
        self._buttons["start"].layout.width = "108px"
        b = self._buttons
        return w.HBox([b["start"], b["stop"], self.bar, self.name, b["save"], self.folder,
                       b["export"]], layout=w.Layout(align_items="center", flex_flow="row wrap"))

    def measure(self) -> None:
        """Run the four experiments on the chosen device, in its worker process."""
        if self._running:
            return
        try:
            values = self.controls.values()
            make_device = self._device(values)
            self._log = self._log or RunLog()
        except XStageError as error:
            self.message.value = style.problem(str(error))
            return
        if self._worker is None:
            self._worker = Worker(make_device)
        self._worker.use(make_device)
        self._stopping.clear()
        self.samples, self.calibration = [], None
        self._set_running(True)
        experiment.deliver(self._steps(experiment.Logged(self._worker, self._log), values),
                           self._take, self._finish)

    def stop(self) -> None:
        """End the experiments; what was sampled stays in the figures."""
        self._stopping.set()
        if self._worker is not None:
            self._worker.stop()

    def close(self) -> None:
        """End the worker and close the widgets."""
        self.stop()
        if self._worker is not None:
            self._worker.close()
        if self._log is not None:
            self._log.close()
        super().close()

    def save(self) -> None:
        """Keep the calibration as JSON; a name that is taken is told, and nothing overwritten."""
        if self.calibration is None:
            self.message.value = style.problem("There is no calibration yet: press Calibrate.")
            return
        name = self.name.value.strip() or self.calibration.name.replace(" ", "-")
        target = Path(self.folder.value) / f"{Path(name).name}.json"
        if target.exists():
            self.message.value = style.problem(
                f"{target} is there already and was not changed; choose another name.")
            return
        try:
            self.calibration.save(target)
        except FileRejected as error:
            self.message.value = style.problem(str(error))
            return
        self.message.value = style.note(f"Saved to {target.resolve()}.")
        self.compare()

    def export(self) -> None:
        """Write the visible figure, its data and the calibration into the folder."""
        figure = list(self.plots.values())[self.figures.selected_index or 0]
        about = {"settings": self.controls.values(), "calibration": self.calibration}
        origin = provenance(self._badge or "PREDICTED", "calibration", _READY)

        def write() -> Iterator[Exported]:
            yield export(figure.plot.figure, self.folder.value, figure.plot.name,
                         figure.plot.data(), about, origin)

        def tell(written: Exported) -> None:
            names = ", ".join(path.name for path in written.files)
            self.message.value = style.note(" ".join([f"Wrote {names}.", *written.notes]))

        experiment.deliver(write(), tell, self._tell_failure)

    def compare(self) -> None:
        """Set all calibrations of the folder side by side, the newest named last."""
        rows = []
        for path in sorted(Path(self.folder.value).glob("*.json")):
            try:
                saved = Calibration.load(path)
            except FileRejected:
                continue  # some other JSON; Export writes its parameters here too
            rows.append([path.stem, saved.badge, str(saved.n_producers),
                         *(text(name, getattr(saved, name)) for name in analysis.PARAMETERS)])
        head = ["saved", "", "K", "t0", "r_SM", "R", "Q"]
        self.overlay.value = style.table(head, rows) if rows else ""

    def _device(self, values: dict[str, Any]) -> Callable[[], Device]:
        live = values["device"] in live_machines()  # it needs no figures of its machine
        return maker(values["device"], None if live else chosen_machine(values))

    def _steps(self, device: Device, values: dict[str, Any]) -> Iterator[Sample | Calibration]:
        running: Generator[Sample, None, Calibration] = analysis.experiments(
            device, n_producers=None if values["n_producers"] is None
            else int(values["n_producers"]),
            burst_bytes=values["burst_bytes"], repeats=values["repeats"])
        self._badge = device.badge
        while not self._stopping.is_set():
            try:
                yield next(running)
            except StopIteration as end:
                yield end.value
                return

    def _take(self, found: Sample | Calibration) -> None:
        if isinstance(found, Calibration):
            self.calibration = found
        else:
            self.samples.append(found)
            self.bar.value = min(len(self.samples) / analysis.EXPECTED_SAMPLES, 0.99)
            self.message.value = style.note(f"{len(self.samples)} samples: {found.experiment}.")
        self._draw()

    def _finish(self, error: XStageError | None) -> None:
        self._set_running(False)
        if self._stopping.is_set():
            self.message.value = style.note(
                f"Stopped after {len(self.samples)} samples; nothing is running.")
        elif error is not None:
            self.message.value = style.problem(str(error))
        else:
            self.bar.value = 1.0
            self.message.value = style.note(f"Done: {len(self.samples)} samples.")

    def _tell_failure(self, error: XStageError | None) -> None:
        if error is not None:
            self.message.value = style.problem(str(error))

    def _set_running(self, running: bool) -> None:
        self._running = running
        for name in ("start", "save", "export"):
            self._buttons[name].disabled = running
        self._buttons["stop"].disabled = not running

    def _draw(self) -> None:
        for figure in self.plots.values():
            figure.draw(figure.plot, self.samples, self.calibration, self._badge)
        if self.calibration is None:
            self.result.value = style.words(["No calibration yet."])
            return
        found = self.calibration
        rows = [["T_iss0", text("_s", found.issue_free_s(found.burst_bytes)),
                 f"at B = {text('_bytes', found.burst_bytes)}"]]
        for label, name in zip(("t0", "r_SM", "R", "Q"), analysis.PARAMETERS, strict=True):
            ends = [text(name, end) for end in found.intervals[name]]
            rows.append([label, text(name, getattr(found, name)), " to ".join(ends)])
        verdict = [f"Do not trust it: {fault}." for fault in found.faults] or [
            "All checks passed: splits agree, the control is flat, nothing drifted."]
        self.result.value = (
            style.badge_line([(found.badge, found.source)])
            + style.table([f"K = {found.n_producers}", "fit", "90 % interval"], rows)
            + style.words([*verdict, *(f"Note: {note}." for note in found.notes)]))


def _figures() -> dict[str, Figure]:
    return {
        "Drain rate": Figure(Fitted("drain-rate", "Zero-gap trains: how fast the path drains",
                                    "volume_bytes", "rate_bytes_per_s"), draw.drain_rate),
        "Capacity": Figure(Fitted("capacity", "Isolated bursts: what is left in the path",
                                  "volume_bytes", "backlog_bytes"), draw.backlog),
        "Free issue": Figure(Fitted("free-issue", "Large gaps: issue time without backpressure",
                                    "burst_bytes", "issue_s"), draw.plateau),
        "Fewer producers": Figure(Fitted("capacity-curve", "Capacity against producers",
                                         "n_producers", "capacity_bytes"), draw.fewer_producers),
    }
