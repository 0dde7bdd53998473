"""House rules that a linter cannot hold, each shown to fail on bad source."""

import ast
from collections.abc import Callable, Iterator
import io
from pathlib import Path, PurePosixPath
import tokenize

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "shardwise"
MAX_CODE_LINES = 600
NO_CODE = {
    getattr(tokenize, name)
    for name in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")
}

# Rooms and files that may use what is forbidden elsewhere.
PRIVATE_TORCH = {"compat", "testing"}  # testing: drives torch's own database of ops
TORCH_DISTRIBUTED = {"comm", "tensor", "compat", "simulate"} | {
    "parallel", "checkpoint", "capture", "auto", "interop", "testing",
}  # fmt: skip
TORCH_DTENSOR = {"interop", "testing"}  # testing: judges it by the same yardstick

Found = Iterator[tuple[int, str]]


def asserts_say_why(tree: ast.Module, room: str) -> Found:
    """An ``assert`` carries a text; nobody raises ``AssertionError`` by hand."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            match node.msg:
                case None | ast.Constant(value=None | ""):
                    yield node.lineno, "assert without a text that says why"
    for line, name in raised_names(tree):
        if name == "AssertionError":
            yield line, "raise AssertionError: use assert, or an error from errors.py"


def no_type_error(tree: ast.Module, room: str) -> Found:
    """Torch swallows a ``TypeError`` in ``__torch_function__`` and tries the reflected operator."""
    for line, name in raised_names(tree):
        if name == "TypeError":
            yield line, "raise TypeError: torch would swallow it; use an error from errors.py"
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and "TypeError" in map(ast.unparse, node.bases):
            yield node.lineno, f"class {node.name} derives from TypeError"


def absolute_imports(tree: ast.Module, room: str) -> Found:
    """Imports name the whole path."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield node.lineno, "relative import"


def private_torch_in_compat(tree: ast.Module, room: str) -> Found:
    """Names of torch that begin with an underscore live in ``compat.py`` only."""
    for line, name in torch_names(tree):
        if room not in PRIVATE_TORCH and is_private(name):
            yield line, f"{name} is private to torch: reach it through compat.py"


def torch_distributed_in_its_rooms(tree: ast.Module, room: str) -> Found:
    """Only rooms that move bytes, or drive those that do, know ``torch.distributed``."""
    for line, name in torch_names(tree):
        if is_within(name, "torch.distributed.tensor", "torch.distributed._tensor"):
            if room not in TORCH_DTENSOR:
                yield line, f"{name}: torch's DTensor is known in interop only"
        elif is_within(name, "torch.distributed") and room not in TORCH_DISTRIBUTED:
            yield line, f"{name}: {room} does not talk to torch.distributed"


RULES: tuple[Callable[[ast.Module, str], Found], ...] = (
    asserts_say_why,
    no_type_error,
    absolute_imports,
    private_torch_in_compat,
    torch_distributed_in_its_rooms,
)


def raised_names(tree: ast.Module) -> Found:
    """Line and bare name of every exception that is raised."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            yield node.lineno, ast.unparse(raised).removeprefix("builtins.")


def torch_names(tree: ast.Module) -> Found:
    """Line and full dotted name of all that is imported or read from torch, aliases resolved."""
    alias_of: dict[str, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    top = alias.name.partition(".")[0]
                    alias_of[alias.asname or top] = alias.name if alias.asname else top
                    if is_within(alias.name, "torch"):
                        yield node.lineno, alias.name
            case ast.ImportFrom(module=str(module), names=names, level=0):
                for alias in names:
                    full = f"{module}.{alias.name}"
                    alias_of[alias.asname or alias.name] = full
                    if is_within(full, "torch"):
                        yield node.lineno, full
    inner = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            parts, base = [], node
            while isinstance(base, ast.Attribute):
                parts.append(base.attr)
                base = base.value
            if isinstance(base, ast.Name):
                full = ".".join([alias_of.get(base.id, ""), *reversed(parts)])
                if is_within(full, "torch"):
                    yield node.lineno, full


def is_within(name: str, *modules: str) -> bool:
    """Whether dotted ``name`` is one of ``modules`` or below it."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def is_private(name: str) -> bool:
    """Whether some part of a dotted name is private; ``torch.ops.aten._softmax`` is an op's real name."""
    parts = name.split(".")
    parts = parts[:3] if parts[:3] == ["torch", "ops", "aten"] else parts
    return any(part.startswith("_") and not part.endswith("__") for part in parts)


def count_code_lines(source: str) -> int:
    """Lines with code on them: no blanks, no comments, no docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    scopes = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, scopes) and ast.get_docstring(node) is not None:
            text = node.body[0]
            assert text.end_lineno is not None, "a parsed node knows where it ends"
            lines.difference_update(range(text.lineno, text.end_lineno + 1))
    return len(lines)


def room_of(path: Path) -> str:
    """The room that a source file belongs to: ``layout/mesh.py`` -> ``layout``."""
    return PurePosixPath(path.relative_to(PACKAGE).as_posix()).parts[0].removesuffix(".py")


def violations(source: str, room: str) -> list[str]:
    """All that ``source``, a file of ``room``, does against the rules."""
    tree = ast.parse(source)
    return [f"line {line}: {what}" for rule in RULES for line, what in rule(tree, room)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_house_follows(rule: Callable[[ast.Module, str], Found]) -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {what}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, what in rule(ast.parse(path.read_text(encoding="utf-8")), room_of(path))
    ]
    assert not found, f"{rule.__doc__}\n" + "\n".join(found)


def test_files_are_short() -> None:
    assert (PACKAGE / "__init__.py").exists(), "the rules look at a package that is there"
    sizes = {
        str(path.relative_to(PACKAGE)): count_code_lines(path.read_text(encoding="utf-8"))
        for path in PACKAGE.rglob("*.py")
    }
    long = {name: size for name, size in sizes.items() if size > MAX_CODE_LINES}
    assert not long, f"over {MAX_CODE_LINES} lines of code, split by meaning: {long}"


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("layout", "assert x > 0"),
        ("layout", "assert x > 0, ''"),
        ("layout", "raise AssertionError"),
        ("layout", "raise AssertionError('never here')"),
        ("tensor", "raise TypeError('no')"),
        ("tensor", "def f():\n    raise builtins.TypeError"),
        ("errors", "class E(ShardError, TypeError): ..."),
        ("layout", "from . import mesh"),
        ("layout", "from ..route.moves import Move"),
        ("program", "from torch._subclasses import FakeTensorMode"),
        ("program", "import torch._dynamo"),
        ("program", "def f():\n    import torch._dynamo as dynamo"),
        ("program", "from torch import _C"),
        ("program", "from torch.utils import _pytree as pytree"),
        ("tensor", "import torch\ny = torch._C._DisableTorchDispatch()"),
        ("tensor", "from torch import Tensor\nz = Tensor._make_wrapper_subclass(cls)"),
        ("capture", "import torch\nf = torch.ops._c10d_functional.all_reduce.default"),
        ("comm", "import torch.distributed as dist\ndist._get_default_group()"),
        ("route", "import torch.distributed"),
        ("layout", "if TYPE_CHECKING:\n    from torch.distributed import ProcessGroup"),
        ("program", "import torch\ntorch.distributed.barrier()"),
        ("tensor", "from torch.distributed.tensor import DTensor"),
        ("parallel", "from torch.distributed import tensor"),
        ("compat", "import torch\nD = torch.distributed.tensor.DTensor"),
    ],
)
def test_bad_source_is_caught(room: str, source: str) -> None:
    assert violations(source, room)


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("layout", "assert x > 0, f'{x} is a size'"),
        ("tensor", "try:\n    f()\nexcept TypeError as e:\n    raise LayoutError('no') from e"),
        ("compat", "from torch._subclasses import FakeTensorMode\nimport torch._C"),
        ("rules", "import torch\naten = torch.ops.aten\nf = torch.ops.aten._softmax.default"),
        ("rules", "f = torch.Tensor.__add__\nself._local = torch_like._private"),
        ("comm", "import torch.distributed as dist\ndist.barrier()"),
        ("simulate", "from torch.distributed import ProcessGroup"),
        ("interop", "from torch.distributed.tensor import DTensor"),
    ],
)
def test_good_source_passes(room: str, source: str) -> None:
    assert violations(source, room) == []


def test_code_lines_are_counted() -> None:
    source = '"""Doc\n\nmore."""\n\nx = [\n    1,  # one\n    # nothing\n]\n\n\ndef f():\n    """One."""\n    return """a\nb"""\n'
    assert count_code_lines(source) == 3 + 1 + 2
    assert count_code_lines("x = 1\n" * 700) == 700
