"""What a fully sharded module can be asked and told; torch's names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from torch import nn

from shardwise.errors import LayoutError, UnsupportedError
from shardwise.layout.mesh import Mesh
from shardwise.parallel.schedule import Group

GROUP = "_shardwise_group"  # where a module keeps its group
_CLASSES: dict[type, type] = {}


@dataclass(frozen=True, slots=True)
class OffloadPolicy:
    """Parameters stay on the device of the mesh. For torch's sake."""


@dataclass(frozen=True, slots=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Parameters, gradients and optimizer state in host memory: only where the mesh is one of CPUs.

    Attributes:
        pin_memory: For torch's sake.
    """

    pin_memory: bool = True


def check_offload(policy: OffloadPolicy, mesh: Mesh) -> None:
    """Raise for a policy that is not carried out here."""
    offloads = hasattr(policy, "pin_memory")  # ours or torch's
    if offloads and mesh.device_type != "cpu":
        raise UnsupportedError(
            f"CPUOffloadPolicy: parameters are kept where they are computed with, on {mesh.device_type}.",
            tries=[
                "offload_policy left away",
                "zero=3 on more ranks",
                "reshard_after_forward=True",
            ],
        )


class FSDPModule:
    """A module that `fully_shard` was called on: it is an instance of its own class and of this one.

    Settings hold until they are changed, and must be the same on all ranks. What only tunes torch's schedule is
    accepted and changes nothing: here a group is gathered while the one before it runs, in the order of the last
    forward, and every backward waits for its reductions.
    """

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Begin to gather the parameters of this module's own group now, for the next forward.

        What changes in the meantime is gathered again. ``module.weight`` remains the DTensor, whose value is the
        whole one; inside ``forward`` it is gathered.

        Args:
            async_op: Return at once; the forward waits, or ``handle.wait()``.

        Returns:
            With ``async_op`` a handle, else None.
        """
        group = _own(self)
        if group is not None:
            group.ahead = True
            group.start()
        handle = UnshardHandle(group)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Give the memory of this group's gathered parameters back. Backward gathers them again."""
        group = _own(self)
        if group is not None:
            group.ahead = False
            group.free()

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward reduces gradients; as ``no_sync``, but until it is set again.

        Without, they are added up in whole gradients, of which the next reduction sends the sum once.

        Args:
            requires_gradient_sync: As described.
            recurse: Of the modules within, too.
        """
        _set(self, recurse, requires_sync=bool(requires_gradient_sync))

    def set_requires_all_reduce(
        self, requires_all_reduce: bool, *, recurse: bool = True
    ) -> None:
        """Hybrid sharding: whether gradients are summed over the replicas.

        Without, nothing of them is sent: they are kept whole until a backward with it, which sends the sum
        once. (Torch's are reduced over the shards at once, and so take less memory.) Nothing on one axis.
        """
        _set(self, recurse, requires_all_reduce=bool(requires_all_reduce))

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients of this group by this, not by the number of ranks."""
        if not factor > 0:
            raise LayoutError(f"gradients cannot be divided by {factor!r}.")
        _set(self, False, divide=float(factor))

    def set_reshard_after_forward(
        self, reshard_after_forward: bool, recurse: bool = True
    ) -> None:
        """Whether parameters are freed after forward, and gathered again for backward."""
        _set(self, recurse, reshard=bool(reshard_after_forward))

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Tuning of torch's; changes nothing: a forward gathers anew, for values may have changed."""

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Tuning of torch's; changes nothing: every backward waits for its reductions."""

    def set_modules_to_forward_prefetch(self, modules: Iterable[nn.Module]) -> None:
        """Tuning of torch's; changes nothing: the order of the last forward says what comes next."""

    def set_modules_to_backward_prefetch(self, modules: Iterable[nn.Module]) -> None:
        """Tuning of torch's; changes nothing: the order of the last forward says what comes next."""


class UnshardHandle:
    """Parameters that are being gathered."""

    def __init__(self, group: Group | None) -> None:
        self._group = group

    def wait(self) -> None:
        """Wait until they are there."""
        if self._group is not None and self._group.ahead:
            self._group.make_whole()


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Have a method of a fully sharded module run as its ``forward`` does, with gathered parameters.

    Args:
        module: The module; of another, nothing changes.
        method_name: Such as ``"generate"``. Its results must show their tensors, as those of ``forward``.

    Raises:
        LayoutError: The module has no such method.

    Example:
        >>> fully_shard(model, mesh)
        >>> register_fsdp_forward_method(model, "generate")
    """
    group = _own(module)
    if group is None:
        return
    method: Any = getattr(module, method_name, None)
    if not callable(method):
        raise LayoutError(f"{type(module).__name__} has no method {method_name!r}.")
    before, after = group.around

    @wraps(method)
    def gathered(*args: Any, **kwargs: Any) -> Any:
        changed = before(module, args, kwargs)
        if changed is not None:
            args, kwargs = changed
        group.inside += 1
        out = None
        try:
            out = method(*args, **kwargs)
        finally:
            group.inside -= 1
            if out is None:
                after(module, args, None)
        if out is None:
            return None
        cast = after(module, args, out)
        return out if cast is None else cast

    setattr(module, method_name, gathered)


def become_fsdp(module: nn.Module) -> None:
    """Give a module the methods of `FSDPModule`; its class keeps its name, and ``isinstance`` holds."""
    kind: Any = type(module)
    if issubclass(kind, FSDPModule):
        return
    made = _CLASSES.get(kind)
    if made is None:
        names = {k: getattr(kind, k) for k in ("__module__", "__qualname__", "__doc__")}
        made = _CLASSES[kind] = type(kind)(kind.__name__, (FSDPModule, kind), names)
    module.__class__ = made


def _own(module: Any) -> Group | None:
    """The group of a module; none on ranks outside of its mesh."""
    return vars(module).get(GROUP)


def _set(module: Any, recurse: bool, **settings: Any) -> None:
    for m in module.modules() if recurse else (module,):
        group = _own(m)
        if group is not None:
            group.configure(**settings)
