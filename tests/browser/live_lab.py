"""A real JupyterLab server, and a notebook of it open in a real browser."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
STARTS_WITHIN_S = 90
# Should the tests die without a farewell, the server ends by itself after this long.
IDLE_ENDS_AFTER_S = 600

# The indicator in the toolbar is idle before there is a kernel, and what runs then is lost.
_KERNEL_READY = """(path) => {
    const context = globalThis.jupyterapp?.shell.currentWidget?.sessionContext;
    return context?.path === path && context.isReady && context.session?.kernel?.status === 'idle';
}"""
# Every code cell of the open notebook has been started, or one has failed, and the kernel is done.
_ALL_RAN = """() => {
    const panel = jupyterapp.shell.currentWidget;
    const cells = panel.content.model.sharedModel.cells
        .filter(cell => cell.cell_type === 'code' && cell.source.trim() !== '');
    const failed = cells.some(cell => cell.outputs.some(o => o.output_type === 'error'));
    return panel.sessionContext.session.kernel.status === 'idle'
        && (failed || cells.every(cell => cell.execution_count !== null));
}"""
_FAILURES = """() => jupyterapp.shell.currentWidget.content.model.sharedModel.cells
    .filter(cell => cell.cell_type === 'code').flatMap(cell => cell.outputs)
    .filter(o => o.output_type === 'error').map(o => o.ename + ': ' + o.evalue)"""


@dataclass(frozen=True)
class LiveLab:
    """A running server: where it listens, and the folders it serves and is set up from."""

    url: str
    token: str
    root: Path
    settings: Path

    def new_folder(self) -> Path:
        """Make a folder below the root with copies of the project's notebooks."""
        folder = self.root / secrets.token_hex(4)
        shutil.copytree(NOTEBOOKS, folder, ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
        return folder

    def choose_theme(self, theme: str) -> None:
        """Make `theme`, light or dark, the one of pages opened from now on."""
        path = self.settings / "@jupyterlab/apputils-extension/themes.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"theme": THEMES[theme]}))

    def end_kernels(self) -> None:
        """Shut down every kernel, so that no test pays for another's."""
        for session in self._request("GET", "api/sessions"):
            self._request("DELETE", f"api/sessions/{session['id']}")

    def _request(self, method: str, path: str) -> Any:
        headers = {"Authorization": f"token {self.token}"}
        request = urllib.request.Request(f"{self.url}/{path}", method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.loads(response.read() or "null")


@contextmanager
def serve(root: Path, private: Path) -> Iterator[LiveLab]:
    """Run JupyterLab on `root` with nothing of the user's own set-up, and end it at the exit."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    lab = LiveLab(f"http://127.0.0.1:{port}", secrets.token_hex(16), root, private / "settings")
    log = private / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen(
            _command(port, lab),
            cwd=root,
            env=os.environ | _private_environment(private),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait_until_up(lab, server, log)
        yield lab
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _command(port: int, lab: LiveLab) -> list[str]:
    return [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.port={port}",
        "--ServerApp.port_retries=0",
        f"--ServerApp.root_dir={lab.root}",
        f"--ServerApp.shutdown_no_activity_timeout={IDLE_ENDS_AFTER_S}",
        f"--MappingKernelManager.cull_idle_timeout={IDLE_ENDS_AFTER_S}",
        f"--IdentityProvider.token={lab.token}",
        "--LabApp.expose_app_in_browser=True",
        f"--LabApp.user_settings_dir={lab.settings}",
        f"--LabApp.workspaces_dir={lab.settings.parent / 'workspaces'}",
    ]


def _private_environment(private: Path) -> dict[str, str]:
    """Keep the user's configuration out, and JupyterLab's offer of news with it."""
    page_config = private / "config/labconfig/page_config.json"
    page_config.parent.mkdir(parents=True)
    news = "@jupyterlab/apputils-extension:announcements"
    page_config.write_text(json.dumps({"disabledExtensions": {news: True}}))
    folders = ("JUPYTER_CONFIG_DIR", "config"), ("JUPYTER_DATA_DIR", "data")
    folders += ("JUPYTER_RUNTIME_DIR", "runtime"), ("IPYTHONDIR", "ipython")
    return {variable: str(private / folder) for variable, folder in folders}


def _wait_until_up(lab: LiveLab, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + STARTS_WITHIN_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            lab._request("GET", "api/status")
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
        else:
            return
    raise RuntimeError(f"JupyterLab did not come up:\n{log.read_text()[-3000:]}")


@dataclass
class OpenNotebook:
    """A notebook in a browser page, with everything the page complained about so far.

    `folder` holds the notebook and what its kernel writes beside it.
    """

    page: Page
    folder: Path
    complaints: list[str] = field(default_factory=list)

    @classmethod
    def at(
        cls, browser: Browser, lab: LiveLab, path: Path, width: int, height: int
    ) -> OpenNotebook:
        """Open the notebook at `path` in a browser that knows no other, and wait for its kernel."""
        page = browser.new_context(viewport={"width": width, "height": height}).new_page()
        notebook = cls(page, path.parent)
        notebook._listen(lab)
        relative = path.relative_to(lab.root).as_posix()
        # In a workspace of its own, where no notebook of an earlier test is opened again.
        workspace = f"{lab.url}/lab/workspaces/{path.parent.name}"
        page.goto(f"{workspace}/tree/{relative}?token={lab.token}")
        page.wait_for_function(_KERNEL_READY, arg=relative, timeout=90_000)
        return notebook

    def _listen(self, lab: LiveLab) -> None:
        """Take down console errors, exceptions, and requests that leave this computer."""
        add, home = self.complaints.append, urlsplit(lab.url).netloc
        self.page.on("console", lambda m: add(f"console: {m.text}") if m.type == "error" else None)
        self.page.on("pageerror", lambda error: add(f"exception: {error}"))
        self.page.on(
            "request",
            lambda r: (
                add(f"leaves this computer: {r.url}")
                if urlsplit(r.url).netloc not in ("", home)
                else None
            ),
        )

    def run_all(self, timeout_s: float = 120) -> None:
        """Choose Run All Cells in the menu, and wait until the last cell has finished.

        Raises
        ------
        AssertionError
            If a cell raises; says what.
        """
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        self.page.wait_for_function(_ALL_RAN, timeout=timeout_s * 1000)
        failures = self.page.evaluate(_FAILURES)
        assert failures == [], f"cells raised {failures}"

    def screenshot(self, name: str) -> Path:
        """Save a picture of the page below `$XSTAGE_SCREENSHOTS`, or beside the notebook."""
        folder = Path(os.environ.get("XSTAGE_SCREENSHOTS", self.folder))
        path = folder / f"{name}.png"
        self.page.screenshot(path=path)
        return path


# Called as open_notebook(name, content=None, width=1280, height=900, theme="light").
OpenNotebookNamed = Callable[..., OpenNotebook]
