"""When the groups of a fully sharded model are gathered, used, freed and reduced.

```text
   forward    gather 1 | use 1 | use 2 | use 3 ...     gather k+1 runs while k is used; k is freed after use
              gather 2 --------^
   backward   ... | use 3 | use 2 | use 1              the other way round; k is gathered again
                    gather 2 ----^
                          | reduce 3 ------            starts when the last gradient of 3 is there,
                                  | reduce 2 ------    or when backward enters another group
```

The order of use is that of the last forward; before the first it is that of the modules. What is sent, and in
which order, follows from the order in which modules are called alone: it is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.transport import Transport
from shardwise.compat import current_graph_task, left_to_outer_backward, queue_callback
from shardwise.errors import GradientError, LayoutError, ShardError
from shardwise.layout.cut import gathered, renumbered
from shardwise.layout.layout import Layout
from shardwise.layout.mesh import Mesh
from shardwise.parallel.buckets import is_reduced
from shardwise.parallel.flat import Flat, Piece, Reduction, add_grad
from shardwise.program.spec import Spec, spec_of
from shardwise.recording import Recorder, recorder
from shardwise.tensor.dtensor import DTensor, wrap
from shardwise.tensor.gradients import syncing


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors in tuples, lists, dicts and dataclasses."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for x in tree:
            yield from tensors_in(x)
    elif isinstance(tree, dict):
        yield from tensors_in(list(tree.values()))
    elif is_dataclass(tree) and not isinstance(tree, type):
        yield from tensors_in([getattr(tree, f.name) for f in fields(tree)])


class Face:
    """How a group's whole parameters look to its modules in one way of calling the model.

    Attributes:
        tensors: Each parameter, and what it is while it is used.
        late: For each parameter that another axis replicates: over whom its gradient is still a sum.
    """

    __slots__ = ("late", "tensors")

    def __init__(
        self,
        flats: list[Flat],
        whole: Callable[[Piece], Layout | None],
        done: tuple[int, ...],
        transport: Transport,
    ) -> None:
        self.tensors: list[tuple[Piece, Tensor]] = []
        self.late: dict[int, tuple[tuple[int, ...], str]] = {}
        for flat in flats:
            for p, leaf in zip(flat.pieces, flat.leaves):
                layout = whole(p)
                if layout is None:
                    self.tensors.append((p, leaf))
                    continue
                spec = spec_of(layout.with_dtype(leaf.dtype), transport)
                self.tensors.append((p, wrap(leaf, spec)))
                rest = _rest(spec, done)
                if rest is not None:
                    self.late[id(p)] = rest


def _rest(spec: Spec, done: tuple[int, ...]) -> tuple[tuple[int, ...], str] | None:
    """The ranks, other than those of a gather, over which a gradient is a pending sum."""
    mesh, coord = spec.layout.mesh, spec.coord
    assert coord is not None, "only ranks on the mesh have groups"
    axes = tuple(
        a
        for a, op in enumerate(spec.layout.dual().partial)
        if op is not None
        and mesh.shape[a] > 1
        and not set(mesh.group_ranks((a,), coord)) <= set(done)
    )
    if not axes:
        return None
    return mesh.group_ranks(axes, coord), "*".join(mesh.axis_name(a) for a in axes)


_LEFT_ALONE = "_shardwise_ignored"
SETTINGS = "module_settings"  # in a transport's state: what users have set on groups, for captured steps


def _nothing(*args: Any) -> None:
    """No hooks yet."""


def leave_alone(p: Tensor) -> None:
    """Note that a parameter was to be ignored."""
    setattr(p, _LEFT_ALONE, True)


def is_left_alone(p: Tensor) -> bool:
    """Whether somebody else cares for a plain parameter's gradient."""
    return _LEFT_ALONE in vars(p) or is_reduced(p)


class Group:
    """The parameters that are gathered together: those of one module that `fully_shard` was called on.

    Attributes:
        module: The module.
        mesh: The mesh given: one axis to shard over, or one to replicate and one to shard over.
        flats: The parameters, one per dtype.
        reshard: Free the parameters after forward; None: unless the module is the outermost one.
        early: Reduce gradients as they appear; else at the end of backward (ZeRO-1).
        divide: What summed gradients are divided by; None: the number of ranks.
        ahead: The user had it gathered for the next forward.
        inside: Methods of the module's that run gathered now; its ``forward`` within them is no new use.
        around: What runs before and after the module's forward.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        flats: list[Flat],
        transport: Transport,
        reshard: bool | None,
        early: bool,
    ) -> None:
        self.module, self.mesh, self.flats, self.transport = module, mesh, flats, transport
        self.reshard, self.early = reshard, early
        self.requires_sync = self.requires_all_reduce = True
        self.divide: float | None = None
        self.ahead, self.inside, self._shown = False, 0, False
        self.around: tuple[Callable[..., Any], Callable[..., Any]] = (_nothing, _nothing)
        self._number = transport.state["groups"] = transport.state.get("groups", 0) + 1
        self.schedule: Schedule | None = None
        self.within = set(module.modules())
        self.calls = 0  # of this step's forward that backward has not come to
        self.missing = 0  # gradients that have not come
        self.entered = False  # backward has come to it
        self.sent = False
        self._faces: dict[Any, Face] = {}
        self._hooked: set[int] = set()
        self.face: Face | None = None

    def __deepcopy__(self, memo: Any) -> Group:
        """A copy would share hooks and memory with the original."""
        raise ShardError("a fully sharded module cannot be copied; copy it before fully_shard.")

    # ---- settings -----------------------------------------------------------------------------------

    def configure(self, **settings: Any) -> None:
        """Change settings; captured steps see it."""
        for name, value in settings.items():
            setattr(self, name, value)
        now = (self.requires_sync, self.requires_all_reduce, self.divide, self.reshard)
        state = self.transport.state
        rest = [entry for entry in state.get(SETTINGS, ()) if entry[0] != self._number]
        state[SETTINGS] = tuple(sorted([*rest, (self._number, *now)], key=lambda e: e[0]))

    @property
    def syncs(self) -> bool:
        """Whether backward reduces its gradients."""
        hybrid = self.mesh.ndim == 2
        return self.requires_sync and (self.requires_all_reduce or not hybrid) and syncing()

    # ---- parameters ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to gather."""
        for flat in self.flats:
            flat.start_gather()

    def make_whole(self) -> None:
        """Wait until gathered."""
        for flat in self.flats:
            flat.finish_gather()
            for leaf in flat.leaves:
                if leaf.requires_grad and id(leaf) not in self._hooked:
                    self._hooked.add(id(leaf))
                    leaf.register_post_accumulate_grad_hook(self._arrived)

    def free(self) -> None:
        """Give the memory back."""
        for flat in self.flats:
            flat.free()

    def free_unless_ahead(self) -> None:
        """Free what an earlier forward has left, but not what was gathered for this one."""
        kept, self.ahead = self.ahead and all(flat.is_current for flat in self.flats), False
        if not kept:
            self.free()

    @property
    def is_whole(self) -> bool:
        """Whether the parameters are gathered."""
        return all(flat.is_whole for flat in self.flats)

    def show(self, key: Mesh | None) -> None:
        """Put the whole parameters into the modules: plain, or as DTensors on a mesh."""
        face = self._faces.get(key)
        if face is None:
            done = self.mesh.ranks
            face = Face(
                self.flats, lambda p: whole_layout(p, self.mesh, key), done, self.transport
            )
            self._faces[key] = face
        self.face, self._shown = face, True
        for p, whole in face.tensors:
            for module, name in p.owners:
                module._parameters[name] = whole  # pyright: ignore[reportArgumentType]
                if isinstance(module, nn.RNNBase):
                    _renew(module)

    def hide(self) -> None:
        """Put the sharded parameters back."""
        if self.face is None or not self._shown:
            return
        self._shown = False
        for p, _ in self.face.tensors:
            for module, name in p.owners:
                module._parameters[name] = p.param  # pyright: ignore[reportArgumentType]
                if isinstance(module, nn.RNNBase):
                    _renew(module)

    # ---- gradients ------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Count what is to come."""
        self.entered = True
        self.missing = sum(leaf.requires_grad for flat in self.flats for leaf in flat.leaves)

    def _arrived(self, leaf: Tensor) -> None:
        schedule = self.schedule
        assert schedule is not None, "backward comes after forward"
        schedule.begin_backward()
        if not self.entered:  # used outside of its module's forward
            self.begin_backward()
        schedule.go_on()
        self.missing -= 1
        if self.missing == 0 and self.calls <= 0:
            self.leave()

    def leave(self) -> None:
        """All gradients are there, or backward is elsewhere: send them, free the parameters."""
        schedule = self.schedule
        assert schedule is not None, "backward comes after forward"
        self.hide()
        frozen = any(not leaf.requires_grad for flat in self.flats for leaf in flat.leaves)
        if self.reshard and not frozen:
            self.free()  # first, then there is room for what is sent
        if self.syncs and self.early:
            schedule.send(self)

    def has_grads(self) -> bool:
        """Whether a gradient is here that was not sent."""
        return any(leaf.grad is not None for flat in self.flats for leaf in flat.leaves)


def _renew(module: nn.RNNBase) -> None:
    module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


def whole_layout(p: Piece, mesh: Mesh, key: Mesh | None) -> Layout | None:
    """The layout of a gathered parameter: on the axes that cut it still, or on the mesh of the inputs.

    Args:
        p: The parameter.
        mesh: The mesh that it is gathered over.
        key: The mesh of DTensor inputs; None when the inputs are plain along ``mesh``.

    Returns:
        None if the parameter is plain then.
    """
    layout: Layout = p.param._spec.layout
    own = layout.mesh
    own_axes = range(mesh.ndim)  # they come first on the joint mesh
    dims = tuple(gathered(on_dim, own_axes, own.shape) for on_dim in layout.dims)
    if key is None:
        rest = own.shape[mesh.ndim :]
        if not rest:
            return None
        coord = own.get_coordinate()
        assert coord is not None, "only ranks on the mesh have groups"
        axes = tuple(range(mesh.ndim, own.ndim))
        names = None if own.names is None else own.names[mesh.ndim :]
        smaller = Mesh.of(own.device_type, rest, own.group_ranks(axes, tuple(coord)), names)
        return Layout(
            smaller,
            tuple(renumbered(on_dim, lambda a: a - mesh.ndim) for on_dim in dims),
            layout.partial[mesh.ndim :],
            layout.shape,
            layout.stride,
            layout.dtype,
        )
    whole = layout.with_placement(dims, layout.partial)
    return whole if own == key else whole.on(key)


class Schedule:
    """The groups of one model, and what happens when.

    Attributes:
        root: The group of the outermost module.
        groups: All groups.
        order: The groups in the order of the last forward.
        key: The mesh of the inputs that are DTensors along the groups' mesh, in this forward; else None.
    """

    def __init__(self, root: Group, groups: list[Group], transport: Transport) -> None:
        self.root, self.groups, self.transport = root, groups, transport
        self.order = list(groups)
        self._seen: list[Group] = []
        self._task: int | None = None
        self._inflight: list[tuple[Group, Reduction]] = []
        self._late: dict[tuple[tuple[int, ...], str], list[tuple[Piece, Tensor]]] = {}
        self._waiting: Group | None = None  # gathered once gradients come
        self.key: Mesh | None = None
        self._tape: Recorder | None = None
        for group in groups:
            group.schedule = self
            if group.reshard is None:
                group.reshard = group is not root

    # ---- forward ------------------------------------------------------------------------------------

    def enter(self, group: Group, args: Any) -> None:
        """A module is about to run."""
        recompute = current_graph_task() >= 0
        if not recompute:
            if group is self.root:
                self._begin_forward(args)
            self._seen.append(group)
        group.make_whole()
        group.show(self.key)
        if not recompute:  # begun after this one's messages were copied apart and freed
            following = self._following(group)
            if following is not None:
                following.start()

    def _begin_forward(self, args: Any) -> None:
        tape = recorder()
        if tape is not None and self._tape is not tape:
            self._set_aside(tape)
        if self._task is not None:  # a backward that raised
            self._reset()
        for group in self.groups:
            group.free_unless_ahead()
        self._seen = []
        self.key = None
        self._check_complete()
        for t in tensors_in(args):
            if isinstance(t, DTensor):
                mesh = t._spec.layout.mesh
                if mesh == self.root.mesh or self.root.mesh.axes_in(mesh) is not None:
                    self.key = mesh

    def _check_complete(self) -> None:
        """Raise if a parameter came after `fully_shard`: nobody would reduce its gradient."""
        for name, p in self.root.module.named_parameters():
            if isinstance(p, DTensor) or not p.requires_grad or is_left_alone(p):
                continue
            raise LayoutError(
                f'"{name}" was put into a fully sharded module; nobody would reduce its gradient.',
                tries=["fully_shard the new module, too", "ignored_params=[...]"],
            )

    def _set_aside(self, tape: Recorder) -> None:
        """Record with new leaves: those that are there belong to real memory."""
        self._check_sent(tape, "before")
        tape.at_end(lambda: self._check_sent(tape, "after"))
        self._tape = tape
        for group in self.groups:
            kept = [flat.set_aside() for flat in group.flats]
            faces, hooked, face = group._faces, group._hooked, group.face
            group._faces, group._hooked, group.face = {}, set(), None

            def bring_back(
                group: Group = group,
                kept: Any = kept,
                old: Any = (faces, hooked, face),
            ) -> None:
                for restore in kept:
                    restore()
                group._faces, group._hooked, group.face = old

            tape.afterwards(bring_back)
        order = self.order

        def forget() -> None:
            self.order, self._tape = order, None
            self._reset()

        tape.afterwards(forget)

    def _check_sent(self, tape: Recorder, when: str) -> None:
        """Raise if gradients wait to be reduced: they are in leaves that a captured step does not share."""
        if any(group.has_grads() for group in self.groups):
            raise tape.refuse(
                f"gradients of a fully sharded module that no backward has reduced are there {when} it.",
                tries=["all micro batches, up to the one that reduces, in the captured step"],
            )

    def _following(self, group: Group) -> Group | None:
        at = len(self._seen)
        if at < len(self.order) and self.order[at - 1] is group:
            return self.order[at]
        return None

    def exit(self, group: Group, out: Any) -> None:
        """A module has run, or raised (then ``out`` is None)."""
        group.hide()
        if current_graph_task() >= 0:
            return
        if group is self.root and len(self._seen) > 1:
            self.order = self._seen
        if out is not None:
            for flat in group.flats:
                flat.check_unwritten()
        hooked = False
        if torch.is_grad_enabled():
            hooked = self._hook(group, out)
        if (
            group.reshard and (hooked or not torch.is_grad_enabled())
        ) or not torch.is_grad_enabled():
            group.free()

    def _hook(self, group: Group, out: Any) -> bool:
        """Have backward tell when it comes to the results of a module."""
        locals_ = [t._local if isinstance(t, DTensor) else t for t in tensors_in(out)]
        tracked = [t for t in locals_ if t.requires_grad]
        if not tracked:
            return False
        group.calls += 1
        entered: list[bool] = []
        versions = [flat.version for flat in group.flats]

        def enter(_: Tensor) -> None:
            if torch.is_grad_enabled():
                raise GradientError(
                    "backward with create_graph=True: the gradients of a fully sharded module cannot be "
                    "differentiated, because its parameters are gone by then.",
                    tries=["distribute_module: its gradients can be differentiated again"],
                )
            self._enter_backward(group, first=not entered)
            entered.append(True)
            if versions != [flat.version for flat in group.flats]:
                raise GradientError(
                    f"parameters of {type(group.module).__name__} have changed between forward and backward.",
                    tries=["optimizer.step() after all backwards of a step"],
                )

        for t in tracked:
            t.register_hook(enter)
        return True

    # ---- backward -----------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Have the end of this backward call `_end`."""
        if self._task is None or self._task < 0:
            self._task = current_graph_task()
            queue_callback(self._end)

    def _enter_backward(self, group: Group, *, first: bool) -> None:
        """Backward has come to the results of a module."""
        self.begin_backward()
        if first:
            group.calls -= 1
        for other in self.groups:  # what backward has left
            if (
                other is not group
                and other.entered
                and not other.sent
                and other.calls <= 0
                and other.missing > 0
                and group.module not in other.within
                and other.module not in group.within
            ):
                other.leave()
        if not group.entered:
            group.begin_backward()
        group.make_whole()
        group.show(self.key)  # what runs again inside of a checkpointed module reads them there
        self._waiting = self._before(group)

    def _before(self, group: Group) -> Group | None:
        """The group that backward will come to next."""
        order = self.order
        if (
            group is self.root and order[0] is group
        ):  # the outermost module ends with its last part
            before = order[-1]
            return before if before.calls > 0 and not before.is_whole else None
        for at in range(len(order) - 1, 0, -1):
            if order[at] is group:
                before = order[at - 1]
                if before is self.root and at == 1:
                    return None
                return before if before.calls > 0 and not before.is_whole else None
        return None

    def send(self, group: Group) -> None:
        """Start to reduce a group's gradients; the last one's must have landed, so that memory is bounded."""
        group.sent = True
        scale = self.scale(group)
        for _, reduction in self._inflight:
            reduction.over_replicas()
        self.go_on()  # first, on every rank: the order of what is sent must be one
        for flat in group.flats:
            if any(leaf.requires_grad for leaf in flat.leaves):
                self._inflight.append((group, flat.start_reduce(scale)))

    def go_on(self) -> None:
        """A group's first gradient is there: let the last group's land, and begin the next gather.

        One after the other, so that what they carry is not in memory at once.
        """
        while len(self._inflight) > (self.root.mesh.ndim == 2):  # over replicas: one step more
            self._land(*self._inflight.pop(0))
        before, self._waiting = self._waiting, None
        if before is not None:
            before.start()

    def scale(self, group: Group) -> float:
        """What gradients are multiplied with: they are means over ranks, or sums over parts of one batch."""
        if group.divide is not None:
            return 1 / group.divide
        return 1.0 if self.key is not None else 1 / len(group.mesh.ranks)

    def _land(self, group: Group, reduction: Reduction) -> None:
        """Give the parameters their gradients, or put those aside that are sums over other axes, too."""
        assert group.face is not None, "backward comes after forward"
        late = group.face.late
        for p, g in reduction.finish():
            where = late.get(id(p))
            if where is None:
                add_grad(p.param, g)
            else:
                self._late.setdefault(where, []).append((p, g))

    def _end(self) -> None:
        """Backward is over: send the rest, wait for all, free all."""
        if self._task is None:  # it was called back more than once
            return
        if left_to_outer_backward(self._end):
            self._task = -1
            return
        with torch.no_grad():
            for group in reversed(self.order):
                used = group.entered and not group.sent
                if group.syncs and (used or group.has_grads()):
                    self.send(group)
            while self._inflight:
                self._land(*self._inflight.pop(0))
            self._settle_late()
        self._reset()

    def _settle_late(self) -> None:
        """Sums over axes that replicate a parameter: one message for all of them."""
        for (ranks, tag), entries in self._late.items():
            parts: dict[torch.dtype, list[tuple[Piece, Tensor]]] = {}
            for p, g in entries:
                parts.setdefault(g.dtype, []).append((p, g))
            for part in parts.values():
                flat = torch.cat([g.reshape(-1) for _, g in part])
                got = self.transport.all_reduce_owned_async(flat, ranks, "sum", tag=tag).wait()
                pieces = got.split([g.numel() for _, g in part])
                for (p, g), piece in zip(part, pieces):
                    add_grad(p.param, piece.view(g.shape))
        self._late = {}

    def _reset(self) -> None:
        self._task = None
        self._inflight, self._late, self._waiting = [], {}, None
        for group in self.groups:
            group.hide()
            group.free()
            group.calls, group.missing = 0, 0
            group.entered = group.sent = False
