"""The command line as a whole: start-up, usage, and what an error looks like."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.commands import Run
from support.made import Made, make_store
from tiny import gqa_group

import kvstore
from kvstore.cli import ls
from kvstore.cli.main import COMMANDS, main
from kvstore.errors import Corrupt, NotFound, StorageError

HEAVY = ("torch", "zarr", "numpy", "rich", "crc32c", "transformers", "numcodecs")


def started(*args: object, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kvstore", *map(str, args)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **{**pipes, **options})  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize("command", [["--help"], ["ls", "STORE"], ["ls", "STORE", "tiny"]])
def test_nothing_heavy_is_imported(made: Made, command: list[str]) -> None:
    args = [str(made.root) if a == "STORE" else a for a in command]
    code = (
        "import sys\n"
        "from kvstore.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, check=True
    )
    assert done.stderr == "[]\n"
    assert done.stdout


def test_help_takes_little_processor_time() -> None:
    """Measured 0.06 s on an idle machine; the bound leaves room for a busy one."""
    before = os.times()
    done = started("--help")
    out, _ = done.communicate()
    after = os.times()
    spent = after.children_user - before.children_user
    assert done.returncode == 0
    assert "COMMAND" in out
    assert spent < 0.5


@pytest.mark.parametrize("command", [c.__name__.rpartition(".")[2] for c in COMMANDS])
def test_every_command_has_help(run: Run, command: str) -> None:
    assert command in run("--help").out
    ran = run(command, "--help")
    assert ran.status == 0
    assert ran.out.startswith(f"usage: kvstore {command}")
    assert all(len(line) <= 100 for line in ran.out.splitlines())


def test_version(run: Run) -> None:
    assert run("--version").out == f"kvstore {kvstore.__version__}\n"


@pytest.mark.parametrize("args", [[], ["nonsense"], ["ls"], ["ls", "--nonsense", "x"]])
def test_wrong_usage_is_status_2(run: Run, args: list[str]) -> None:
    ran = run(*args)
    assert ran.status == 2
    assert ran.out == ""
    assert "usage: kvstore" in ran.err


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (NotFound("no store\nhere\x1b[31m"), 2, r"no store\nhere\x1b[31m"),
        (Corrupt("chunk 3 is damaged"), 1, "chunk 3 is damaged"),
        (StorageError(28, "cannot write: no space; free some", "/x"), 1, "free some: /x"),
        (PermissionError(13, "Permission denied", "/y"), 1, "Permission denied: /y"),
    ],
)
def test_an_error_is_one_line(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    status: int,
    line: str,
) -> None:
    def fail(_root: str) -> None:
        raise error

    monkeypatch.setattr(ls, "catalog_of", fail)
    ran = run("ls", tmp_path)
    assert ran.status == status
    assert ran.out == ""
    assert ran.err.startswith("kvstore ls: ")
    assert ran.err.endswith(line + "\n")
    assert ran.err.count("\n") == 1


def test_a_reader_that_leaves_early_is_no_error(made: Made) -> None:
    """Enough output that the pipe is full when nobody reads it any more."""
    for i in range(3000):
        folder = made.root / "__kvstore__/trash" / f"{i:016x}"
        folder.mkdir(parents=True)
    read, write = os.pipe()
    process = started("verify", made.root, stdout=write)
    os.close(write)
    os.read(read, 10)
    os.close(read)
    _, err = process.communicate()
    assert process.returncode == 141
    assert err == ""


def test_an_interrupt_is_quiet(made: Made) -> None:
    """Stopped while it waits for an answer, as Ctrl-C does."""
    code = (
        "import sys, kvstore.cli.rm as rm\n"
        "from kvstore.cli.main import main\n"
        "def wait(*_):\n    print('waiting', flush=True)\n    import time\n    time.sleep(60)\n"
        "rm._agreed = wait\n"
        f"sys.exit(main(['rm', {str(made.root)!r}, 'tiny', '--all']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == ""


def test_a_name_that_the_terminal_cannot_show(made: Made) -> None:
    """The model's name is not ASCII, standard output is."""
    root = made.root.parent / "umlaut"
    make_store(root, [gqa_group()], model="Größe\x1b[2J")
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    process = started("ls", root, env=env)
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert r"Gr\xf6\xdfe\x1b[2J" in out


def test_main_takes_its_own_arguments_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["kvstore", "ls", "/nowhere/at/all"])
    assert main() == 2
