"""The order of the rooms: what each may import. The table of docs/architecture.md says the same to a reader."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import meshswarm

PACKAGE = Path(meshswarm.__file__).parent
ARCHITECTURE = Path(__file__).parents[1] / "docs" / "architecture.md"
LAYERS = (
    ("errors",),
    ("config", "identity", "span", "tasks"),
    ("net",),
    ("artifacts",),
    ("dht",),
    ("discovery",),
    ("membership",),
    ("stage",),
    ("fetching", "ledger", "routing"),
    ("head",),
    ("api",),
    ("serving",),
    ("peer",),
    ("commands",),
    ("cli",),
    ("__main__",),
)
"""Lowest first. A room imports what is below it, and nothing beside it."""
ARTIFACTS_LAYERS = (
    ("files", "names", "ranges"),
    ("merkle",),
    ("gguf", "torrent"),
    ("header_proof",),
    ("model_info", "sources"),
    ("manifests",),
    ("store",),
    ("header_exchange", "manifest_exchange"),
)
"""The same within the rooms that have rooms of their own."""
STAGE_LAYERS = (
    ("families",),
    ("engine",),
    ("sessions", "slices"),
    ("sizes",),
    ("proving",),
    ("loading", "owner_first"),
    ("owner_watch",),
)


def heights(layers: tuple[tuple[str, ...], ...]) -> dict[str, int]:
    return {room: height for height, rooms in enumerate(layers) for room in rooms}


HEIGHT = heights(LAYERS)


def rooms_imported(source: str, package: str = "meshswarm") -> Iterator[tuple[int, str]]:
    """(line, room) of every import of `package`, at the top of the file or within a function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.startswith(f"{package}.") and name != "meshswarm.__version__":
                yield node.lineno, name.removeprefix(f"{package}.").split(".")[0]


def wrong_imports(
    room: str, source: str, package: str = "meshswarm", height: dict[str, int] = HEIGHT
) -> list[tuple[int, str]]:
    """(line, room) of every import that does not point down."""
    return [
        (line, imported)
        for line, imported in rooms_imported(source, package)
        if imported != room and height[imported] >= height[room]
    ]


def rooms_of(folder: Path) -> set[str]:
    inside = (path for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists())
    return {path.stem for path in inside} - {"__init__"}


@pytest.mark.parametrize(
    ("folder", "layers"),
    [(PACKAGE, LAYERS), (PACKAGE / "artifacts", ARTIFACTS_LAYERS), (PACKAGE / "stage", STAGE_LAYERS)],
)
def test_every_room_has_its_place(folder: Path, layers: tuple[tuple[str, ...], ...]) -> None:
    assert rooms_of(folder) == set(heights(layers))


@pytest.mark.parametrize(
    ("folder", "layers", "package"),
    [
        (PACKAGE, LAYERS, "meshswarm"),
        (PACKAGE / "artifacts", ARTIFACTS_LAYERS, "meshswarm.artifacts"),
        (PACKAGE / "stage", STAGE_LAYERS, "meshswarm.stage"),
    ],
)
def test_imports_point_down(folder: Path, layers: tuple[tuple[str, ...], ...], package: str) -> None:
    wrong = []
    for path in sorted(folder.rglob("*.py")):
        inside = path.relative_to(folder)
        room = inside.parts[0].removesuffix(".py")
        if room != "__init__":
            wrong += [
                f"src/meshswarm/{path.relative_to(PACKAGE)}:{line} imports {imported}"
                for line, imported in wrong_imports(room, path.read_text(encoding="utf-8"), package, heights(layers))
            ]
    assert not wrong, "imports that do not point down:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("room", "line", "expected"),
    [
        ("net", "from meshswarm.config import Address", []),
        ("net", "from meshswarm.net.codes import CloseCode", []),
        ("span", "from meshswarm.config import Address", [(1, "config")]),
        ("net", "from meshswarm.dht.node import Dht", [(1, "dht")]),
        ("net", "from meshswarm import dht", [(1, "dht")]),
        ("net", "import meshswarm.dht.node", [(1, "dht")]),
        ("routing", "from meshswarm.ledger.receipt import Claim", [(1, "ledger")]),
        ("head", "def late():\n    from meshswarm.api.app import create_app", [(2, "api")]),
        ("cli", "from meshswarm import __version__", []),
    ],
)
def test_an_import_upwards_is_seen(room: str, line: str, expected: list[tuple[int, str]]) -> None:
    assert wrong_imports(room, line) == expected


def modules_imported(path: Path, modules: dict[str, Path]) -> set[str]:
    """The modules of the package that a file imports, within functions and for type checkers too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & modules.keys()


def circle_in(folder: Path, package: str) -> list[str]:
    """Modules that import each other in a circle, the first found; empty when there is none."""
    modules = {
        ".".join((package, *path.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in folder.rglob("*.py")
    }
    imports = {name: modules_imported(path, modules) - {name} for name, path in modules.items()}
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("room", sorted(room for room in HEIGHT if room != "net" and (PACKAGE / room).is_dir()))
def test_modules_do_not_import_each_other_in_a_circle(room: str) -> None:
    """In `net` a connection and its streams know each other; everywhere else one of two is the lower one."""
    assert circle_in(PACKAGE / room, f"meshswarm.{room}") == []


def test_a_circle_is_seen_where_types_alone_close_it(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("from room.two import Two\n")
    (tmp_path / "two.py").write_text("if TYPE_CHECKING:\n    from room.one import One\n")
    assert set(circle_in(tmp_path, "room")) == {"room.one", "room.two"}


def test_the_document_lists_the_rooms_in_this_order() -> None:
    rows = re.findall(r"^\| (`.*?) \|", ARCHITECTURE.read_text(encoding="utf-8"), re.MULTILINE)
    listed = [name.strip("`/").removesuffix(".py") for row in rows for name in row.split(", ")]
    assert set(listed) == set(HEIGHT) - {"__main__"}
    in_order = [HEIGHT[name] for name in listed]
    assert in_order == sorted(in_order, reverse=True)
