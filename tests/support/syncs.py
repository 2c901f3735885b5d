"""What the tests of the order of writes share: which calls were made, on which names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.io.posix import PosixEngine

TEMPORARY = ".tmp-?"

WRITES: dict[str, Callable[[PosixEngine], object]] = {
    "write": lambda engine: engine.write("a/x", [b"1" * 100]),
    "create": lambda engine: engine.create("a/x", b"1" * 100),
    "write_into": lambda engine: engine.write_into("a/x", 100, [(0, b"1" * 100)]),
}


def everything(root: Path) -> list[str]:
    """All files and folders below, hidden ones too."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


class Log:
    """Records the calls that matter to a power cut, by the names below the root."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.root = root
        for name in ("fsync", "pwritev", "rename", "link", "unlink", "mkdir"):
            monkeypatch.setattr(os, name, self._logged(name, getattr(os, name)))

    def _logged(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            names = args[:1] if name in ("fsync", "pwritev", "unlink", "mkdir") else args[:2]
            if all(self.short(one) is not None for one in names):
                self.calls.append(" ".join([name, *(str(self.short(one)) for one in names)]))
            return real(*args, **kwargs)

        return call

    def short(self, path: str | int) -> str | None:
        full = os.fspath(f"/proc/self/fd/{path}" if isinstance(path, int) else path)
        if isinstance(path, int):
            full = str(Path(full).readlink())
        if Path(full) == self.root:
            return "/"
        if not full.startswith(f"{self.root}/"):
            return None
        parts = full[len(str(self.root)) + 1 :].rstrip("/").split("/")
        parts = [TEMPORARY if part.startswith(".tmp-") else part for part in parts]
        if parts[:2] == ["__kvstore__", "trash"] and len(parts) > 2:
            parts[2] = "?"
        return "/".join(parts)
