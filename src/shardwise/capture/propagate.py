"""``propagate``: the layouts of all tensors of a function, from those of a few.

```text
   mark_sharding on a few   ->  calls.py   run once on global fakes: every call with the rule that answers
                                spread.py  axes go along the rules' factors, both ways, with reasons
                            ->  Plan       a layout for every tensor; apply(module) lays its parameters out
```

Pure: a function of the calls, the marks and the mesh, so all ranks find the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
import re
from typing import Any

from torch import Tensor, nn

from shardwise.capture.annotate import forget
from shardwise.capture.calls import Calls, Value, record_calls
from shardwise.capture.spread import Conflict, Reason, Spread, place
from shardwise.comm.meshes import as_mesh
from shardwise.compat import tree_flatten, tree_unflatten
from shardwise.errors import LayoutError
from shardwise.layout.layout import Layout
from shardwise.layout.mesh import Mesh
from shardwise.program.compile import Slot
from shardwise.tensor.create import distribute_module, distribute_tensor
from shardwise.tensor.dtensor import DTensor

SHOWN = ("input", "parameter", "buffer", "result")  # rows of the table


@dataclass(frozen=True, slots=True)
class Decision:
    """The layout of one tensor, and why.

    Attributes:
        name: Of an argument, a parameter, a buffer or a result; of another tensor the call that made it, counted:
            ``"linear.3"``.
        role: "input", "parameter", "buffer", "result", "made" (by a call), or "constant" (no argument decides it).
        layout: Its layout.
        because: For each axis that shards it the reason; an axis that is not here replicates it.
        site: The user's line that made it, if a call did.
    """

    name: str
    role: str
    layout: Layout
    because: dict[str, Reason]
    site: str = ""


def propagate(
    fn: Callable[..., Any],
    *args: Any,
    mesh: Any = None,
    strict: bool = False,
    **kwargs: Any,
) -> Plan:
    """Infer the layouts of all tensors of a forward from the few that are marked (`mark_sharding`).

    ``fn`` runs once, on tensors without data: nothing is computed, sent or drawn, and what it leaves in its modules
    is put back. Layouts spread from the marks to operands and results alike, by the same rules that run the calls;
    what no mark reaches is replicated. Gradients need no look: theirs follow from the layouts of the forward.

    Cost: about half a millisecond for each call of ``fn``, no memory to speak of, no communication.

    Args:
        fn: A module, or a function that computes a loss; it may close over modules. Not one that runs a backward.
        *args: Its arguments: plain tensors, DTensors or tensors on the meta device, of the global shapes. The
            layout of a DTensor counts as a mark.
        mesh: The mesh; None is that of ``with mesh:``, else one over the world.
        strict: Conflicts raise.
        **kwargs: More arguments.

    Returns:
        The plan.

    Raises:
        LayoutError: A mark does not fit its tensor; with ``strict``, the marks are in conflict. All ranks alike.
        CaptureError: The function reads values of tensors, or runs a backward.

    Example:
        >>> plan = shardwise.propagate(model, tokens, mesh=mesh)
        >>> print(plan)
        >>> plan.apply(model)
    """
    mesh = as_mesh(mesh)
    calls = record_calls(fn, args, kwargs, mesh)
    spread = Spread(calls, mesh)
    spread.run()
    plan = Plan(mesh, calls, spread)
    if strict and plan.conflicts:
        said = [f"  {c}" for c in _grouped(plan.conflicts, _conflict_text)]
        raise LayoutError(
            f"the marks are in conflict at {len(plan.conflicts)} places:\n" + "\n".join(said),
            tries=['leave dims open in the marks ("?", ...) where another may decide'],
        )
    return plan


class Plan:
    """What `propagate` found.

    Attributes:
        mesh: The mesh.
        decisions: For each tensor its layout and why, by name.
        conflicts: Where a layout could not go on: another axis shards the dim, the axis shards another dim of the
            tensor, a mark forbids it, or too few rows. Data moves there.
        opaque: Calls of whose dims nothing is known, with their lines: layouts do not pass them.
    """

    def __init__(self, mesh: Mesh, calls: Calls, spread: Spread) -> None:
        self.mesh = mesh
        self.conflicts: tuple[Conflict, ...] = spread.conflicts
        self.opaque: tuple[tuple[str, str], ...] = tuple(dict.fromkeys(calls.opaque))
        self.decisions: dict[str, Decision] = {}
        self._arguments = calls.arguments
        self._names: list[str] = []
        for v in calls.values:
            name = _unique(v, self.decisions)
            self._names.append(name)
            because = {mesh.axis_name(a): r for a, r in spread.reasons[v.index].items()}
            self.decisions[name] = Decision(
                name, v.role, spread.layout(v.index), because, v.site
            )
        for name, i in calls.tied.items():
            self.decisions.setdefault(name, replace(self.decisions[self._names[i]], name=name))
        self._parameters = {key: self._names[i] for key, i in calls.parameters.items()}
        self._held = calls.held  # so that no id is used twice
        self._prefixes = calls.prefixes

    @property
    def layouts(self) -> dict[str, Layout]:
        """The layout of each tensor, by name."""
        return {name: d.layout for name, d in self.decisions.items()}

    def why(self, name: str) -> str:
        """All calls that a tensor's layout came through, one line each.

        Raises:
            LayoutError: There is no such tensor.
        """
        found = self.decisions.get(name)
        if found is None:
            raise LayoutError(
                f'the plan has no tensor "{name}".', tries=["plan.layouts: all names"]
            )
        lines = [f"{name}: {found.layout}"]
        for axis, reason in found.because.items():
            first, *rest = reason.steps()
            lines.append(f"  {axis}: {first}")
            lines += [f"  {'':{len(axis)}}  through {step}" for step in rest]
        return "\n".join(lines)

    def apply(self, module: nn.Module, *, src_data_rank: int | None = 0) -> nn.Module:
        """Lay a module's parameters and buffers out as planned, in place. What the plan does not know is replicated.

        Args:
            module: The module that was looked at, or another of the same kind (of any device), by names.
            src_data_rank: Position on the mesh of the rank whose values count; None: each rank cuts its own.

        Returns:
            The module. Parameters keep their identity, tied ones stay tied.

        Raises:
            LayoutError: No parameter of the module is in the plan, one has another shape, or is distributed
                otherwise already. Nothing has been changed then.
        """
        found = dict(self._matching(module))
        if not found and next(module.parameters(), None) is not None:
            names = ", ".join(n for n, d in self.decisions.items() if d.role == "parameter")
            raise LayoutError(
                f"no parameter of {type(module).__name__} is in the plan.",
                tries=["apply it to the module that was looked at", f"the plan knows: {names}"],
            )
        for name, x, wanted in found.values():
            self._check(name, x, wanted)

        def lay_out(_: str, sub: nn.Module, mesh: Mesh) -> None:
            for table in (sub._parameters, sub._buffers):
                for key, x in table.items():
                    if x is None or isinstance(x, DTensor) or id(x) not in found:
                        continue
                    forget(x)
                    placed = distribute_tensor(
                        x.detach(),
                        mesh,
                        found[id(x)][2].placements,
                        src_data_rank=src_data_rank,
                    )
                    if isinstance(x, nn.Parameter):
                        placed = nn.Parameter(placed, requires_grad=x.requires_grad)
                    table[key] = placed  # pyright: ignore[reportArgumentType]

        return distribute_module(module, self.mesh, lay_out)

    def distribute(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Lay arguments out as planned. Sizes may be others than those that were looked at.

        Args:
            *args: As `propagate` got them: plain tensors, whole on every rank, or DTensors.
            **kwargs: The same by name.

        Returns:
            The arguments and those by name: ``model(*args, **kwargs)``.

        Raises:
            LayoutError: They are of another form.
        """
        given, tree = tree_flatten((args, kwargs))
        planned, wanted = tree_flatten(self._arguments)
        if tree != wanted:
            raise LayoutError(
                "these arguments are of another form than those that were looked at."
            )
        out = list(given)
        for i, (x, at) in enumerate(zip(given, planned)):
            if isinstance(at, Slot) and isinstance(x, Tensor):
                layout = self.decisions[self._names[at.index]].layout
                if tuple(x.shape) != layout.shape:
                    layout = layout.chunked()  # sizes of pieces are those of one shape
                out[i] = distribute_tensor(x, self.mesh, layout.placements)
        return tree_unflatten(out, tree)

    def __str__(self) -> str:
        """A table: name, placements, because. Names that differ in numbers only share a row."""
        rows = list(_grouped(self._shown(), _row_text, ("tensor", "placements", "because")))
        if self.conflicts:
            rows += ["", f"conflicts: {len(self.conflicts)}"]
            rows += [f"  {text}" for text in _grouped(self.conflicts, _conflict_text)]
        if self.opaque:
            said = dict.fromkeys(f"{name} {place(site)}" for name, site in self.opaque)
            rows += ["", "layouts do not pass: " + ", ".join(said)]
        return "\n".join(rows)

    def _shown(self) -> list[Decision]:
        return sorted(
            (d for d in self.decisions.values() if d.role in SHOWN),
            key=lambda d: SHOWN.index(d.role),
        )

    def _matching(self, module: nn.Module) -> Iterator[tuple[int, tuple[str, Tensor, Layout]]]:
        """The module's tensors that the plan knows: by identity, else by name."""
        named = [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]
        known = {name: self._parameters.get(id(x)) for name, x in named}
        if not any(known.values()):
            wanted = {n for n, d in self.decisions.items() if d.role in ("parameter", "buffer")}
            prefixes = self._prefixes or [""]
            best = max(prefixes, key=lambda p: sum(p + name in wanted for name, _ in named))
            known = {name: best + name if best + name in wanted else None for name, _ in named}
        for name, x in named:
            found = known[name]
            if found is not None:
                yield id(x), (name, x, self.decisions[found].layout)

    def _check(self, name: str, x: Tensor, wanted: Layout) -> None:
        if tuple(x.shape) != wanted.shape:
            raise LayoutError(
                f'"{name}" has shape {tuple(x.shape)}, and the plan is for {wanted}.'
            )
        if isinstance(x, DTensor):
            own = x._spec.layout
            if own.mesh != self.mesh or (own.dims, own.partial) != (
                wanted.dims,
                wanted.partial,
            ):
                raise LayoutError(f'"{name}" is {own} already, and the plan wants {wanted}.')


def _unique(v: Value, taken: Iterable[str]) -> str:
    """A value's name, changed if another has it."""
    name, count = v.name, 1
    while name in taken:
        count += 1
        name = f"{v.name} ({v.role} {count})"
    return name


# ---- text -----------------------------------------------------------------------------------


def _row_text(d: Decision) -> tuple[str, ...]:
    mesh = d.layout.mesh
    said = [f"{mesh.axis_name(a)}: {p}" for a, p in enumerate(d.layout.placements)]
    because = "; ".join(f"{axis}: {reason}" for axis, reason in d.because.items())
    return d.name, ", ".join(said), because


def _conflict_text(c: Conflict) -> tuple[str, ...]:
    return c.tensor, str(c).removeprefix(c.tensor)


def _grouped(
    things: Iterable[Any], texts: Callable[[Any], tuple[str, ...]], head: tuple[str, ...] = ()
) -> Iterator[str]:
    """Aligned rows; those whose names differ in numbers only, and all else in nothing, are one."""
    counts: dict[tuple[str, ...], list[str]] = {}
    for thing in things:
        name, *rest = texts(thing)
        counts.setdefault((re.sub(r"\d+", "*", name), *rest), []).append(name)
    rows = [head] if head else []
    for (pattern, *rest), names in counts.items():
        name = names[0] if len(names) == 1 else f"{pattern} ({len(names)})"
        rows.append((name, *rest))
    if not head:
        yield from ("".join(row) for row in rows)
        return
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        yield "  ".join(text.ljust(n) for text, n in zip(row, widths)).rstrip()
