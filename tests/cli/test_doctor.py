"""``kvstore doctor``."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from support.commands import Run

from kvstore import rowcopy
from kvstore.cli import folder_probes, gpu_probes, probes
from kvstore.cli.findings import Check

NAMES = [
    *("python", "kernel", "cores", "memory", "native", "filesystem", "space", "writable"),
    *(
        "publish",
        "links",
        "sync",
        "direct",
        "cachestat",
        "torch",
        "gpu",
        "cufile",
        "gpudirect",
        "kvikio",
    ),
]


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is imported in a process of its own: that takes seconds."""
    monkeypatch.setattr(gpu_probes, "_asked", lambda _package, _code: None)


def test_a_folder_really_looked_at(run: Run, tmp_path: Path) -> None:
    """The one test that asks torch itself."""
    ran = run("doctor", tmp_path, "--json")
    found = ran.json
    checks = {c["name"]: c for c in found["checks"]}
    assert list(checks) == NAMES
    assert ran.status == 0
    assert found["ready"]
    assert found["engine"]["name"] == "posix"
    assert found["engine"]["reason"]
    assert checks["writable"]["state"] == "ok"
    assert checks["publish"]["state"] == "ok"
    assert checks["torch"]["state"] == "ok"
    assert checks["kernel"]["detail"] == f"Linux {os.uname().release}"
    assert {c["state"] for c in found["checks"]} <= {"ok", "lacking", "info"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_torch")
def test_the_report_for_people(run: Run, tmp_path: Path) -> None:
    ran = run("doctor", tmp_path)
    assert ran.status == 0
    lines = ran.out.splitlines()
    assert lines[0].startswith("ok      python      ")
    assert any(line.startswith("--      torch       not installed") for line in lines)
    assert any(line.strip() == "-> pip install torch" for line in lines)
    assert lines[-1].startswith("I/O engine: posix. ")


@pytest.mark.usefixtures("no_torch")
def test_the_folder_is_the_current_one_by_default(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("doctor", "--json").json["directory"] == "."


def test_no_such_folder(run: Run, tmp_path: Path) -> None:
    ran = run("doctor", tmp_path / "none")
    assert (ran.status, ran.out) == (2, "")
    assert "is not a folder" in ran.err


def by_name(folder: Path) -> dict[str, Check]:
    return {c.name: c for c in folder_probes.folder_checks(str(folder))}


def test_a_file_system_that_replaces_folders_cannot_hold_a_store(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace(old: Path, new: Path) -> Path:
        shutil.rmtree(new, ignore_errors=True)
        shutil.move(old, new)
        return new

    monkeypatch.setattr(Path, "rename", replace)
    monkeypatch.setattr(gpu_probes, "_asked", lambda _package, _code: None)
    assert by_name(tmp_path)["publish"].state == "failed"
    ran = run("doctor", tmp_path)
    assert ran.status == 1
    assert "No store can work here." in ran.out
    assert list(tmp_path.iterdir()) == []


def test_each_lack_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: object, **_options: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr(folder_probes.DirectPolicy, "works", property(lambda _self: False))
    monkeypatch.setattr(folder_probes.ResidencyProbe, "mostly_resident", lambda _self, *_args: None)
    monkeypatch.setattr(folder_probes, "_LITTLE_SPACE", 1 << 62)
    checks = by_name(tmp_path)
    for name in ("links", "sync", "direct", "cachestat", "space"):
        assert checks[name].state == "lacking"
        assert checks[name].advice
    assert checks["publish"].state == "ok"


def test_without_the_c_functions_it_says_what_that_costs(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_probes, "_asked", lambda _package, _code: None)
    monkeypatch.setattr(rowcopy, "functions", lambda: None)
    for switch, state in ("1", "lacking"), ("0", "info"):
        monkeypatch.setenv("KVSTORE_NATIVE", switch)
        ran = run("doctor", tmp_path, "--json")
        (check,) = [c for c in ran.json["checks"] if c["name"] == "native"]
        assert (ran.status, check["state"], "half as fast" in check["detail"]) == (0, state, True)
        assert (check["advice"] is None) is (state == "info")


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_options: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(folder_probes.tempfile, "mkdtemp", refuse)
    checks = by_name(tmp_path)
    assert checks["writable"].state == "lacking"
    assert "Permission denied" in checks["writable"].detail
    assert "direct" not in checks


@pytest.mark.parametrize(
    ("line", "state"),
    [
        ("ext4 /dev/sda", "ok"),
        ("nfs4 host:/x", "ok"),
        ("tmpfs tmpfs", "lacking"),
        ("overlay overlay", "lacking"),
    ],
)
def test_kinds_of_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, state: str
) -> None:
    folder = tmp_path / "with space"
    folder.mkdir()
    point = str(folder).replace(" ", "\\040")
    text = f"1 0 8:1 / / rw - ext3 /dev/root rw\n2 1 8:2 / {point} rw - {line} rw\njunk\n"
    monkeypatch.setattr(Path, "read_text", lambda *_args, **_options: text)
    check = folder_probes._file_system(folder)
    assert check.state == state
    assert check.detail.startswith(line.split(maxsplit=1)[0])
    assert folder_probes.mount_of(folder)[0] == str(folder)


# -- packages and drivers -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("print('noise'); print('{\"a\": 1}')", {"a": 1}),
        ("raise RuntimeError('libcuda.so.1: cannot open')", "failed: RuntimeError: libcuda"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "died of signal 11"),
        ("import time; time.sleep(60)", "did not answer within 1 s"),
        ("print('no json')", "failed"),
    ],
)
def test_a_driver_that_breaks_or_hangs_hurts_nobody(
    monkeypatch: pytest.MonkeyPatch, code: str, answer: object
) -> None:
    monkeypatch.setattr(gpu_probes, "_TIMEOUT", 1.0 if "sleep" in code else 30.0)
    found = gpu_probes._asked("numpy", code)
    if isinstance(answer, str):
        assert str(found).startswith(answer)
    else:
        assert found == answer
    assert gpu_probes._asked("no-such-package-here", code) is None


GPU = ["NVIDIA H200"]
TORCH = {"version": "2.13.0", "built": "13.0", "gpus": GPU}


@pytest.mark.parametrize(
    ("answer", "gpus", "state"),
    [
        ({"gds": True, "same": True}, GPU, "ok"),
        ({"gds": False, "same": True}, GPU, "ok"),
        ({"gds": True, "same": False}, GPU, "lacking"),
        ("died of signal 11", GPU, "lacking"),
        ("failed: libcuda.so.1", [], "info"),
        (None, GPU, "lacking"),
        (None, [], "info"),
    ],
)
def test_what_is_said_of_kvikio(answer: object, gpus: list[str], state: str) -> None:
    check = gpu_probes._kvikio(answer, gpus)  # type: ignore[arg-type]
    assert check.state == state
    assert (check.advice is not None) == (state == "lacking")


@pytest.mark.parametrize(
    ("answer", "gpus", "state"),
    [
        (TORCH, GPU, "ok"),
        ({"version": "2.13.0+cpu", "built": None, "gpus": []}, [], "ok"),
        ({"version": "2.13.0+cpu", "built": None, "gpus": []}, GPU, "lacking"),
        ("failed: ImportError", [], "lacking"),
        (None, [], "lacking"),
    ],
)
def test_what_is_said_of_torch(answer: object, gpus: list[str], state: str) -> None:
    check, sees = gpu_probes._torch(answer, gpus)  # type: ignore[arg-type]
    assert check.state == state
    assert sees == (answer is TORCH)


def test_with_a_gpu_what_is_missing_between_it_and_the_disk_is_lacking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_probes, "_driver_gpus", lambda: GPU)
    monkeypatch.setattr(
        gpu_probes, "_asked", lambda package, _: TORCH if package == "torch" else None
    )
    monkeypatch.setattr(gpu_probes, "_CUFILE", ())
    monkeypatch.setenv("LD_LIBRARY_PATH", "")
    monkeypatch.setattr(gpu_probes.sysconfig, "get_paths", lambda: {"purelib": str(tmp_path)})
    checks = {c.name: c for c in gpu_probes.gpu_checks()}
    assert (checks["gpu"].state, checks["gpu"].detail) == ("ok", "NVIDIA H200")
    if not Path("/sys/module/nvidia_fs").exists():
        assert checks["gpudirect"].state == "lacking"
        assert "modprobe nvidia_fs" in str(checks["gpudirect"].advice)
    assert checks["cufile"].state == "lacking"
    assert checks["kvikio"].advice == "pip install 'kvstore[gds]'"
    library = tmp_path / "nvidia" / "cu13" / "lib" / "libcufile.so.0"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"")
    assert gpu_probes._cufile(GPU).detail == str(library)


def test_the_reason_follows_from_the_findings() -> None:
    info, ok = Check("gpu", "info", ""), Check("gpu", "ok", "")
    direct, lacking = Check("direct", "ok", ""), Check("direct", "lacking", "")
    assert "no GPU; it reads past the page cache" in probes._reason(
        "posix", {"gpu": info, "direct": direct}
    )
    assert "torch copies to the GPU" in probes._reason("posix", {"gpu": ok, "direct": direct})
    assert "through the page cache" in probes._reason("posix", {"gpu": info, "direct": lacking})
    kvikio = Check("kvikio", "ok", "26.10, GPUDirect Storage is available")
    assert "26.10" in probes._reason("gds", {"kvikio": kvikio})
