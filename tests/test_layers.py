"""The architecture, checked: what may import what, and what may not be in the code at all.

A new module fails the first test until it is given a level here.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import kvstore
from kvstore import errors

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "kvstore"
MAX_LINES = 400

# A module imports modules of its own level and of those below it, without cycles.
LEVELS: dict[int, str] = {
    0: "errors version",
    1: "elements geometry parallel share layout keys jsonform identity",  # frozen values
    2: "shard sums paths runs election placement segments",
    3: "extent records",  # the format; no I/O up to here
    4: "native io io.protocol io.posix io.direct io.failpoints io.fallocate io.local_leavings "
    "io.local_names io.local_read io.local_write io.oserrors io.residency io.select io.staging "
    "io.pump io.workers",
    5: "buffers detect scatter device_scatter pages rowcopy tiles plan lookup load write commit "
    "namespace store runtime report worker array faults verify verify_content "
    "verify_private inspect catalog deliver marks seal jobs collect leavings",
    6: "kvstore",  # the public names
    7: "cli demo bench plugins __main__",  # with all in these folders: they use the public names
}
FOLDERS = ("cli", "demo", "bench", "plugins")
# Exceptions, each with its reason.
UPWARD = {
    ("identity", "paths"): "a namespace's name is part of its identity; paths alone spells names",
}
VALUES = 3
COMMANDS = 7
IO_MODULES = {
    *("asyncio", "concurrent", "ctypes", "fcntl", "glob", "io", "mmap", "multiprocessing", "os"),
    *("pathlib", "random", "secrets", "selectors", "shutil", "socket", "subprocess", "tempfile"),
    *("threading", "time", "urllib", "uuid"),
}
HEAVY = {"torch", "zarr", "numcodecs", "fsspec", "rich", "transformers", "kvikio", "tensorstore"}
FORBIDDEN_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {
    *("eval", "exec", "compile", "__import__"),
    *("torch.load", "torch.save", "np.save", "numpy.save", "np.load", "numpy.load"),
    *("yaml.load", "os.system"),
}
ARCHITECTURE = (
    "errors elements geometry parallel share layout keys identity jsonform shard paths runs "
    "election extent records io.protocol io.posix io.staging buffers scatter plan lookup load "
    "write commit namespace store verify array cli.main"
)


def name_of(path: Path, package: Path = PACKAGE) -> str:
    """Module name below the package: ``io.posix``; ``kvstore`` for the package itself."""
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "kvstore"


MODULES = {name_of(p): p for p in sorted(PACKAGE.rglob("*.py"))}


def parsed() -> dict[str, ast.Module]:
    """The syntax tree of every module."""
    return {name: ast.parse(path.read_text("utf-8")) for name, path in MODULES.items()}


TREES = parsed()


class WithoutTyping(ast.NodeTransformer):
    """Drops what only a type checker reads."""

    def visit_If(self, node: ast.If) -> ast.AST:
        if ast.unparse(node.test) == "TYPE_CHECKING":
            return ast.Pass()
        return self.generic_visit(node)


def level_of(module: str) -> int | None:
    """Level of a module; None where nobody has given it one."""
    folder = module.split(".", maxsplit=1)[0]
    wanted = folder if folder in FOLDERS else module
    return next((n for n, names in LEVELS.items() if wanted in names.split()), None)


def imports(tree: ast.AST, known: dict[str, Path] = MODULES) -> set[str]:
    """Modules of the package that a source imports, wherever the import stands."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(a.name, None) for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [(node.module or "", a.name) for a in node.names]
        else:
            continue
        for module, member in names:
            if module.split(".")[0] != "kvstore":
                continue
            below = module.partition(".")[2] or "kvstore"
            inner = f"{below}.{member}".removeprefix("kvstore.")
            found.add(inner if member is not None and inner in known else below)
    return found


class AtImport(WithoutTyping):
    """Keeps what runs when a module is imported, in branches and classes too."""

    def visit_FunctionDef(self, _node: ast.FunctionDef) -> ast.AST:
        return ast.Pass()

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]  # noqa: N815  # ast's names


def top_level(source: str) -> Iterator[ast.AST]:
    """Nodes that run when a module is imported."""
    return ast.walk(AtImport().visit(ast.parse(source)))


def imported_roots(nodes: Iterator[ast.AST]) -> set[str]:
    """First names of everything imported by these statements."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
    return found


def calls(tree: ast.AST) -> set[str]:
    """Dotted names of everything called."""
    return {ast.unparse(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_a_level(module: str) -> None:
    assert level_of(module) is not None, f"give {module} a level in {Path(__file__).name}"


def test_levels_name_no_module_that_is_gone() -> None:
    placed = {name for names in LEVELS.values() for name in names.split()}
    assert sorted(placed - set(MODULES)) == []


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_only_downward(module: str) -> None:
    own = level_of(module)
    for other in imports(TREES[module]):
        theirs = level_of(other)
        if (module, other) in UPWARD:
            continue
        assert own is not None
        assert theirs is not None, f"{module} imports {other}, which does not exist"
        assert theirs <= own, f"{module} (level {own}) imports {other} (level {theirs})"


def test_nothing_imports_in_a_circle() -> None:
    """Imports for annotations alone do not count: nothing runs them."""
    graph = {m: imports(WithoutTyping().visit(tree)) - {m} for m, tree in parsed().items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("module", [m for m in MODULES if (level_of(m) or VALUES) <= VALUES])
def test_the_format_does_no_io(module: str) -> None:
    assert not imported_roots(ast.walk(TREES[module])) & IO_MODULES
    assert not calls(TREES[module]) & {"open", "print", "input"}


def test_jsonform_needs_nothing_but_errors() -> None:
    assert imports(TREES["jsonform"]) == {"errors"}


@pytest.mark.parametrize("module", ARCHITECTURE.split())
def test_the_architecture_is_there(module: str) -> None:
    assert module in MODULES


@pytest.mark.parametrize("module", [m for m in MODULES if level_of(m) != COMMANDS])
def test_heavy_packages_are_imported_where_they_are_used(module: str) -> None:
    """Commands, demo and benchmarks are held to it by what a process really imports, below."""
    assert not imported_roots(top_level(MODULES[module].read_text("utf-8"))) & HEAVY


SOURCES = [
    p
    for folder in ("kvstore", "spec", "tests", "tools", ".ci")
    for p in sorted((ROOT / folder).rglob("*"))
    if p.is_file() and (p.suffix == ".py" or (folder in ("tools", ".ci") and p.suffix == ""))
]


def test_files_are_short() -> None:
    lengths = {str(p.relative_to(ROOT)): len(p.read_text("utf-8").splitlines()) for p in SOURCES}
    assert len(lengths) > len(MODULES)
    assert {name: n for name, n in lengths.items() if n > MAX_LINES} == {}


def test_names_say_what_a_file_is() -> None:
    vague = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert [str(p) for p in SOURCES if p.stem in vague] == []


@pytest.mark.parametrize(
    "path",
    [p for p in SOURCES if p.suffix == ".py" and "tests" not in p.parts],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_nothing_that_could_run_stored_bytes(path: Path) -> None:
    tree = ast.parse(path.read_text("utf-8"))
    assert not imported_roots(ast.walk(tree)) & FORBIDDEN_IMPORTS
    assert not calls(tree) & FORBIDDEN_CALLS
    assert "allow_pickle=True" not in ast.unparse(tree)


def modules_after(code: str) -> set[str]:
    """First names of all modules in a fresh process that has run some code."""
    script = f"{code}\nimport sys\nprint('\\n'.join(m.split('.')[0] for m in sys.modules))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import kvstore",
        "import kvstore; kvstore.LayerGroup; kvstore.Identity; kvstore.open",
        "import kvstore.cli.main",
    ],
)
def test_importing_is_cheap(code: str) -> None:
    loaded = modules_after(code)
    assert "kvstore" in loaded
    assert not loaded & HEAVY


def test_the_import_of_a_heavy_package_would_be_seen() -> None:
    assert "torch" in modules_after(
        "from kvstore.elements import element\nelement('int8').torch_dtype()"
    )


def test_public_names_exist() -> None:
    assert len(set(kvstore.__all__)) == len(kvstore.__all__)
    for name in kvstore.__all__:
        assert getattr(kvstore, name) is not None
    assert set(kvstore.__all__) <= set(dir(kvstore))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        kvstore.nothing  # noqa: B018


def test_exception_tree() -> None:
    """What a handler may rely on."""
    found = {
        name: tuple(base.__name__ for base in value.__bases__)
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert found == {
        "KVStoreError": ("Exception",),
        "InvalidArgument": ("KVStoreError", "ValueError"),
        "NotCertified": ("InvalidArgument",),
        "GeometryMismatch": ("InvalidArgument",),
        "NotFound": ("KVStoreError", "LookupError"),
        "FormatError": ("KVStoreError",),
        "UnsupportedVersion": ("FormatError",),
        "Corrupt": ("FormatError",),
        "StorageError": ("KVStoreError", "OSError"),
    }


def test_the_checks_see_what_they_look_for() -> None:
    source = (
        "import kvstore.io.posix\n"
        "from kvstore import errors, __version__\n"
        "def f():\n    from kvstore.io import staging\n    import torch\n    eval('1')\n"
        "if TYPE_CHECKING:\n    import zarr\n"
        "try:\n    import rich\nexcept ImportError:\n    pass\n"
        "class A:\n    import numcodecs\n    def g():\n        import fsspec\n"
    )
    tree = ast.parse(source)
    known = {"io.posix": ROOT, "io.staging": ROOT, "errors": ROOT}
    assert imports(tree, known) == {"io.posix", "errors", "kvstore", "io.staging"}
    assert imported_roots(top_level(source)) == {"kvstore", "rich", "numcodecs"}
    assert imported_roots(ast.walk(tree)) >= {"torch", "zarr"}
    assert calls(tree) == {"eval"}
    assert level_of("io.unheard_of") is None
    assert level_of("cli.anything") == level_of("cli") == COMMANDS
