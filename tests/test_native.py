"""That the C functions are there wherever they can be, and not needed where they cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig

import pytest

from kvstore import rowcopy
from kvstore.io import pump
from kvstore.native import SWITCH, library

LOADED = """
import torch, kvstore
from kvstore import rowcopy
from kvstore.io import pump
print(rowcopy.functions() is not None, pump.pump() is not None)
"""


@pytest.mark.skipif(
    os.environ.get(SWITCH) == "0"
    or shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0]) is None,
    reason="there is no C compiler, or they are not wanted",
)
def test_they_are_there_where_there_is_a_compiler() -> None:
    assert rowcopy.functions() is not None
    assert pump.pump() is not None


@pytest.mark.parametrize("switch", ["0", "1"])
def test_the_switch_leaves_them_alone(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, switch)
    # What this process found is kept, and may be by the other setting.
    there = library.__wrapped__() is not None
    assert switch == "1" or not there
    ran = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [str(there)] * 2
