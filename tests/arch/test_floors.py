"""A room imports only from lower floors. This is the plan of the house, and the test that holds it.

Every import counts: inside functions, under ``TYPE_CHECKING``, and by ``import_module`` with a literal name.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "shardwise"

FLOORS = (
    ("errors", "events", "compat", "recording"),
    ("layout", "random"),
    ("route",),
    ("rules", "comm"),
    ("program",),
    ("tensor",),
    ("parallel", "checkpoint", "capture", "auto", "interop", "simulate", "testing"),
    ("debug", "cli"),
    # The front door, and doors under the names of torch's modules.
    ("__init__", "__main__", "device_mesh", "experimental", "placement_types"),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

# Rooms on one floor do not see each other, but for these.
SIDEWAYS = {
    ("testing", "simulate"): "laws are checked on virtual ranks",
    ("auto", "capture"): "automatic parallelism decides the layouts of a captured step",
}


def room_of(path: Path) -> str:
    """The room that a source file belongs to: ``layout/mesh.py`` -> ``layout``."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(source: str) -> Iterator[tuple[int, str]]:
    """Line and room of every import of our own package in ``source``."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(module=module, names=names, level=0):
                modules = [f"{module}.{alias.name}" for alias in names]
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                modules = [name]
            case _:
                continue
        for module in modules:
            top, _, rest = module.partition(".")
            if top == "shardwise":
                room = rest.partition(".")[0]
                # `from shardwise import DTensor` goes through the front door.
                yield node.lineno, room if room in FLOOR_OF else "__init__"


def violations(room: str, source: str) -> list[str]:
    """Every import in ``source``, a file of ``room``, that the plan does not allow."""
    if room not in FLOOR_OF:
        return [f"room {room!r} is not on the plan in tests/arch/test_floors.py"]
    if room == "__init__":
        return []
    return [
        f"line {line}: {room} (floor {FLOOR_OF[room]}) imports {other} (floor {FLOOR_OF[other]})"
        for line, other in imported_rooms(source)
        if other != room and FLOOR_OF[other] >= FLOOR_OF[room] and (room, other) not in SIDEWAYS
    ]


def test_every_import_goes_down() -> None:
    assert (PACKAGE / "__init__.py").exists(), "the plan looks at a package that is there"
    found = [
        f"{path.relative_to(PACKAGE)}: {what}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for what in violations(room_of(path), path.read_text(encoding="utf-8"))
    ]
    assert not found, "imports that go up or sideways:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("layout", "import shardwise.route"),
        ("layout", "import torch, shardwise.route.moves as moves"),
        ("layout", "from shardwise.route.moves import Move"),
        ("layout", "from shardwise import route"),
        ("layout", "from shardwise import Layout"),
        ("layout", "import shardwise"),
        ("layout", "from shardwise import *"),
        ("layout", "from shardwise.random import philox"),
        ("rules", "from shardwise.comm.transport import Transport"),
        ("comm", "from shardwise.rules import registry"),
        ("errors", "from shardwise import events"),
        ("program", "def f():\n    from shardwise.tensor.dtensor import DTensor"),
        ("program", "if TYPE_CHECKING:\n    from shardwise.tensor.dtensor import DTensor"),
        ("program", "class A:\n    async def f(self):\n        import shardwise.tensor"),
        ("program", "import importlib\nimportlib.import_module('shardwise.tensor')"),
        ("simulate", "from shardwise.testing import laws"),
        ("parallel", "from shardwise.debug import show"),
        ("utils", "x = 1"),
    ],
)
def test_bad_source_is_caught(room: str, source: str) -> None:
    assert len(violations(room, source)) == 1


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("__init__", "from shardwise.cli import main"),
        ("layout", "from shardwise.layout.mesh import Mesh\nfrom shardwise import errors"),
        ("layout", "import torch\nfrom shardwise_extras.tensor import x"),
        ("tensor", "from shardwise import comm, compat, rules\nimport shardwise.program.run"),
        ("testing", "from shardwise.simulate import simulate"),
        ("debug", "def f():\n    from shardwise.parallel import plan"),
    ],
)
def test_good_source_passes(room: str, source: str) -> None:
    assert violations(room, source) == []
