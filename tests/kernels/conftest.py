"""What the tests of kernels share."""

from __future__ import annotations

import pytest

from xstage_lab.errors import DeviceUnavailable
from xstage_lab.kernels.host import check_races


@pytest.fixture(scope="session")
def race_checker() -> None:
    """Skip, with the reason, where ThreadSanitizer does not work."""
    try:
        check_races("")
    except DeviceUnavailable as error:
        pytest.skip(str(error))
