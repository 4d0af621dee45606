"""A Bokeh figure inside a widget, drawn by a BokehJS that comes from this computer."""

from __future__ import annotations

from typing import Any

from bokeh.io import output_notebook
from bokeh.resources import Resources
from IPython.core.getipython import get_ipython
from jupyter_bokeh import BokehModel


class LiveFigure(BokehModel):
    """A Bokeh figure that a page opened later also sees as it is now."""

    def get_state(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state to send to a page, with the figure's present data."""
        self._trait_values["render_bundle"] = self._model_to_traits(self._model)
        return super().get_state(*args, **kwargs)


def load_bokehjs() -> None:
    """Give the page BokehJS from this computer; nothing is fetched from the network."""
    if getattr(get_ipython(), "kernel", None) is not None:
        output_notebook(Resources(mode="inline", components=["bokeh"]), hide_banner=True)
