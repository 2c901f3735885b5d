"""What the README says, run."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import kvstore

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def example(name: str) -> str:
    found = re.search(rf"<!-- example: {name} -->\n```python\n(.*?)```", README, re.DOTALL)
    assert found is not None, f"README.md has no example {name}"
    return found[1]


def run(source: str, names: dict[str, Any]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(source, "README.md", "exec"), names)  # noqa: S102 - our own README
    return out.getvalue()


@pytest.fixture
def names(tmp_path: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    pages = [torch.randn(12, 3, 16, 128).to(torch.bfloat16) for _ in range(30)]
    return {
        "token_ids": list(range(160)),
        "block_ids": [11, 3, 7, 0, 1, 2, 9, 8, 4, 5],
        "pages": pages,
        "root": str(tmp_path / "kv"),
    }


def test_ten_lines_store_and_load(names: dict[str, Any]) -> None:
    source = example("ten-lines")
    assert '"/tmp/kv"' in source
    printed = run(source.replace('"/tmp/kv"', "root"), names)
    assert printed.startswith("10 of 10 blocks in ")
    before = [p.clone() for p in names["pages"]]
    used = names["block_ids"]
    for page in names["pages"]:
        page[used] = 0
    result = names["worker"].load(names["keys"], used)
    assert result.blocks == 10
    assert all(torch.equal(a, b) for a, b in zip(before, names["pages"], strict=True))


def test_ranks_share_a_session(names: dict[str, Any]) -> None:
    run(example("ten-lines").replace('"/tmp/kv"', "root"), names)
    identity: kvstore.Identity = names["identity"]
    other = kvstore.Identity("other", 30, identity.groups, revision="main")
    names["namespace"] = names["store"].namespace(other)
    pages = [torch.zeros(12, 1, 16, 128, dtype=torch.bfloat16) for _ in range(30)]
    names["buffers"] = kvstore.PagedBuffers.packed(names["group"], pages)
    printed = run(example("ranks"), names)
    # Two of the three ranks that hold this head's tokens, and six with other heads, are to come; or
    # another replica was elected.
    assert printed.startswith("False extent ")
    assert "wait for rank" in printed


def test_every_command_is_there() -> None:
    from kvstore.cli.main import main

    listed = re.findall(r"^kvstore (\w+)", README, re.MULTILINE)
    assert listed == ["ls", "show", "verify", "rm", "gc", "convert", "doctor", "demo", "bench"]
    for command in listed:
        with pytest.raises(SystemExit) as stop, contextlib.redirect_stdout(io.StringIO()):
            main([command, "--help"])
        assert stop.value.code == 0


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


def test_names_in_the_api_table_exist() -> None:
    for name in re.findall(r"`worker\.(\w+)\(", README):
        assert hasattr(kvstore.Worker, name)
    for name in re.findall(r"`(?:namespace)?\.(\w+)\(", README):
        assert hasattr(kvstore.Namespace, name) or hasattr(kvstore.PagedBuffers, name), name
    for name in re.findall(r"`\.(\w+)`", README):
        assert hasattr(kvstore.PagedBuffers, name), name
