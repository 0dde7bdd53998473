"""Every exception that shardwise raises on purpose.

```text
Exception
└── ShardError                          the base: `except ShardError` catches all of them
    ├── LayoutError      (ValueError)            a placement, a layout or a shape that cannot be
    ├── MeshError        (ValueError)            a mesh that cannot be, or meshes that do not fit
    ├── CommError        (RuntimeError)          moving bytes failed, or was asked for wrongly
    │   ├── DeadlockError                        ranks wait for each other, or disagree
    │   └── AbortedError                         another rank raised; this one stopped with it
    ├── UnsupportedError (NotImplementedError)   an op, or a use of it, without a rule
    ├── GradientError    (RuntimeError)          a gradient that cannot be had, or would be lost
    ├── AliasError       (RuntimeError)          a write that a view and its base cannot share
    ├── CheckpointError  (RuntimeError)          a checkpoint that cannot be written, read or trusted
    ├── CaptureError     (RuntimeError)          a step that cannot be captured, or no longer runs as captured
    └── StrictError      (RuntimeError)          strict mode met something it was told to refuse
```

None is a `TypeError`: inside a `__torch_function__` or a `__torch_dispatch__` torch reads that
as "not implemented here" and reports something else.

A message says what happened, with values (not types), then where, then what to do:

```text
MeshError: the operands of aten.mm live on meshes that cannot be combined.
  in     aten.mm(x: f32[8, 6] {dp: S(0), tp: S(1)}, w: f32[6, 4] {pp: R})
  at     train.py:31, module "blocks.0.mlp.up"
  try    - w.redistribute(x.device_mesh, [Replicate(), Shard(0)])
```

Inner code raises the first line, and with ``tries=`` what to do; where it happened is filled in at one
place, `shardwise.tensor.explain`, on the way out.
"""

from collections.abc import Iterable, Mapping


class ShardError(Exception):
    """Base of everything that shardwise raises on purpose.

    Args:
        what: The first line of the message.
        tries: What to do about it, one line each.

    Attributes:
        where: Label to text ("in", "at", "mesh"), filled in on the way out; empty before.
        tries: As given.

    Example:
        >>> raise LayoutError("Shard(dim=2) on a tensor with 2 dims")
        Traceback (most recent call last):
        ...
        shardwise.errors.LayoutError: Shard(dim=2) on a tensor with 2 dims
    """

    def __init__(self, what: str = "", *, tries: Iterable[str] = ()) -> None:
        super().__init__(what)
        self.where: dict[str, str] = {}
        self.tries = tuple(tries)

    def __str__(self) -> str:
        return explain(self.args[0] if self.args else "", self.where, self.tries)


class LayoutError(ShardError, ValueError):
    """A placement, layout or shape that cannot be."""


class MeshError(ShardError, ValueError):
    """A mesh that cannot be built, or meshes that cannot be combined."""


class CommError(ShardError, RuntimeError):
    """A collective failed, or was called in a way that no group can carry out."""


class DeadlockError(CommError):
    """No rank can go on: each waits for another, or members called different collectives."""


class AbortedError(CommError):
    """Another rank raised, so this rank was stopped in its collective."""


class UnsupportedError(ShardError, NotImplementedError):
    """An op, or a way of calling it, that has no rule."""


class GradientError(ShardError, RuntimeError):
    """A gradient that cannot be had as it was asked for, or that would be lost."""


class AliasError(ShardError, RuntimeError):
    """A write through a view that its base would not see, or the other way round."""


class CheckpointError(ShardError, RuntimeError):
    """A checkpoint that cannot be written, cannot be read, or does not hold what it should."""


class CaptureError(ShardError, RuntimeError):
    """A step that no later run could repeat, or ranks that captured different ones."""


class StrictError(ShardError, RuntimeError):
    """Strict mode met something that it was told to refuse."""


def explain(
    what: str, where: Mapping[str, str] | None = None, tries: Iterable[str] = ()
) -> str:
    """Lay out an error message: what, where, and what to do.

    Args:
        what: The first line: one sentence with values, not types.
        where: Label to text, in the order to be shown ("in", "at", "mesh", ...). Empty texts
            are left out; the lines of a text with several are aligned.
        tries: Things to do about it, one line each.

    Returns:
        The message.

    Example:
        >>> print(explain("a (2, 2) mesh needs 4 ranks, not 3.", {"at": "train.py:3"}, ["x"]))
        a (2, 2) mesh needs 4 ranks, not 3.
          at     train.py:3
          try    - x
    """
    rows = [(label, text) for label, text in (where or {}).items() if text]
    rows += [("" if i else "try", f"- {text}") for i, text in enumerate(tries)]
    width = max([6, *(len(label) for label, _ in rows)])
    lines = [what]
    for label, text in rows:
        first, *more = text.splitlines()
        lines.append(f"  {label:<{width}} {first}")
        lines += [f"  {'':<{width}} {line}" for line in more]
    return "\n".join(lines)
