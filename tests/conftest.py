"""No test writes into the user's own run log."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from xstage_lab.runlog import RUNLOG_VARIABLE


@pytest.fixture(scope="session", autouse=True)
def own_run_log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give the tests, and what they start, a run log of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUNLOG_VARIABLE, str(tmp_path_factory.mktemp("log") / "runs.sqlite"))
        yield
