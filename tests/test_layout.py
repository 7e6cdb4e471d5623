"""The order of the rooms: what each may import. The table of docs/architecture.md says the same to a reader."""

from __future__ import annotations

import ast
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
    ("stage",),
    ("ledger", "routing"),
    ("head",),
    ("api",),
    ("serving",),
    ("peer",),
    ("commands",),
    ("cli",),
    ("__main__",),
)
"""Lowest first. A room imports what is below it, and nothing beside it."""
STAGE_LAYERS = (
    ("families",),
    ("engine",),
    ("sessions", "slices"),
    ("sizes",),
    ("proving",),
    ("loading", "owner_first"),
    ("owner_watch",),
)
"""The same within the largest room."""


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


@pytest.mark.parametrize(("folder", "layers"), [(PACKAGE, LAYERS), (PACKAGE / "stage", STAGE_LAYERS)])
def test_every_room_has_its_place(folder: Path, layers: tuple[tuple[str, ...], ...]) -> None:
    assert rooms_of(folder) == set(heights(layers))


@pytest.mark.parametrize(
    ("folder", "layers", "package"),
    [(PACKAGE, LAYERS, "meshswarm"), (PACKAGE / "stage", STAGE_LAYERS, "meshswarm.stage")],
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


def test_the_document_lists_the_rooms_in_this_order() -> None:
    rows = re.findall(r"^\| (`.*?) \|", ARCHITECTURE.read_text(encoding="utf-8"), re.MULTILINE)
    listed = [name.strip("`/").removesuffix(".py") for row in rows for name in row.split(", ")]
    assert set(listed) == set(HEIGHT) - {"__main__"}
    in_order = [HEIGHT[name] for name in listed]
    assert in_order == sorted(in_order, reverse=True)
