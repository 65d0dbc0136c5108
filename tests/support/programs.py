"""Programs that a fresh machine lacks, and that the tests marked with `needs` are skipped without."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.browser import find_chromium

FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")
IS_INSTALLED = {
    "bubblewrap": lambda: shutil.which("bwrap") is not None,
    "chromium": lambda: find_chromium() is not None,
    "libfaketime": FAKETIME.exists,
}
