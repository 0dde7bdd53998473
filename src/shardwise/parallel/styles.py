"""Styles: how one module of a tensor-parallel plan is laid out, and what it takes and gives.

```text
ColwiseParallel            out features cut: takes R, gives S(-1); nothing is sent forward
RowwiseParallel            in features cut: takes S(-1), gives a pending sum, settled to R
SequenceParallel           parameters whole, the sequence cut: norms, dropout
PrepareModuleInput         only what goes in is placed
PrepareModuleOutput        only what comes out
PrepareModuleInputOutput   both
```

The names, and the meaning of the arguments, are torch's. What torch asks of sizes is not asked here: features
that do not divide are cut unevenly, and the pieces find together again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from shardwise.compat import break_graph
from shardwise.errors import LayoutError
from shardwise.layout.layout import Layout
from shardwise.layout.mesh import Mesh
from shardwise.layout.placement import Placement, Replicate, Shard
from shardwise.parallel.crossing import entered, left, moved, passed
from shardwise.tensor.dtensor import DTensor

Layouts = Placement | Sequence[Placement | None] | None


class ParallelStyle:
    """Base of the styles; a style of your own overrides some of these three methods.

    One object may serve many modules: what belongs to a module is in the hooks that `attach` registers.
    """

    def check(self, module: nn.Module, name: str) -> None:
        """Raise a `LayoutError` if the style does not fit the module. Nothing has been changed yet.

        Args:
            module: The module that the plan names.
            name: Its name, for the message.
        """

    def layouts(self, module: nn.Module) -> dict[str, Placement]:
        """The placement of each of the module's own parameters that is to be distributed, by name."""
        return {}

    def check_layout(self, name: str, layout: Layout) -> None:
        """Raise a `LayoutError` if a parameter cannot be laid out so. Nothing has been changed yet.

        Args:
            name: The parameter's, for the message.
            layout: Its layout, from `layouts`.
        """

    def attach(self, module: nn.Module, mesh: Mesh) -> None:
        """Register hooks that place what goes into the module and what comes out."""


def _only(style: ParallelStyle, module: nn.Module, name: str, *kinds: type[nn.Module]) -> None:
    if not isinstance(module, kinds):
        raise LayoutError(
            f'{type(style).__name__} does not fit "{name}", a {type(module).__name__}: '
            f"it is for {' and '.join(k.__name__ for k in kinds)}.",
            tries=["SequenceParallel() for norms and dropout", "distribute_module for others"],
        )


def _known_sizes(module: nn.Module) -> dict[int, int]:
    """The global size of the last dim of the module's input, where it follows from its weight."""
    return {-1: module.in_features} if isinstance(module, nn.Linear) else {}


class _Features(ParallelStyle):
    """One tensor in, one out, around a linear map whose features are cut, in whole units where one is given."""

    def __init__(
        self,
        given: Placement,
        wanted: Placement | None,
        gives: Placement,
        local: bool,
        unit: int | None,
    ) -> None:
        self.input_layouts, self.output_layouts, self.unit = given, gives, unit
        self.desired_input_layouts, self.use_local_output = wanted, local

    def check_layout(self, name: str, layout: Layout) -> None:
        """Plain code on a rank without a head cannot tell how many there are: ``view(.., -1, size)`` fails there."""
        if self.unit is None or not self.use_local_output:
            return
        empty = [c[0] for c in layout.mesh.coordinates() if 0 in layout.box(c)[1]]
        if empty and layout.numel:
            raise LayoutError(
                f'"{name}", {layout}, has fewer units of {self.unit} than ranks: none on '
                f"{', '.join(map(str, empty))}.",
                tries=["use_local_output=False: DTensors between the layers"],
            )

    def check(self, module: nn.Module, name: str) -> None:
        """Only a Linear or an Embedding has features to cut."""
        _only(self, module, name, nn.Linear, nn.Embedding)

    def wanted(self, module: nn.Module) -> Placement:
        """What the module takes."""
        assert self.desired_input_layouts is not None, "else the subclass says"
        return self.desired_input_layouts

    def attach(self, module: nn.Module, mesh: Mesh) -> None:
        """Place the first argument and the result."""
        given, wanted, gives = self.input_layouts, self.wanted(module), self.output_layouts
        sizes, out = _known_sizes(module), left if self.use_local_output else moved

        def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            if not args:
                return args
            return (entered(args[0], mesh, given, wanted, sizes), *args[1:])

        def after(_: nn.Module, args: tuple[Any, ...], y: DTensor) -> Tensor:
            return out(y, mesh, gives)

        module.register_forward_pre_hook(break_graph(before))
        module.register_forward_hook(break_graph(after))


class ColwiseParallel(_Features):
    """Cut a Linear by its output features, an Embedding by its width.

    Args:
        input_layouts: How a plain input is placed; default ``Replicate()``.
        output_layouts: How the output is placed; default ``Shard(-1)``: as it is computed.
        use_local_output: Give this rank's plain piece; else a DTensor.
        unit: Cut whole units of so many features: the size of an attention head, so that 5 heads over 2 ranks are
            3 and 2. Where several query heads share a head of keys, the queries are cut in units of all of them.

    Example:
        >>> parallelize_module(mlp, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        >>> heads = {"[qkv]": ColwiseParallel(unit=64), "o": RowwiseParallel(unit=64)}
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        unit: int | None = None,
    ) -> None:
        super().__init__(
            input_layouts or Replicate(),
            Replicate(),
            output_layouts or Shard(-1, unit=unit),
            use_local_output,
            unit,
        )

    def layouts(self, module: nn.Module) -> dict[str, Placement]:
        """Weight and bias by output features."""
        if isinstance(module, nn.Embedding):
            return {"weight": Shard(1, unit=self.unit)}
        return {"weight": Shard(0, unit=self.unit), "bias": Shard(0, unit=self.unit)}


class RowwiseParallel(_Features):
    """Cut a Linear by its input features, an Embedding by its rows.

    The result is a sum of what the ranks compute; the bias is added once.

    Args:
        input_layouts: How a plain input is placed; default ``Shard(-1)``. For an Embedding, which takes
            whole indices, say ``Replicate()``.
        output_layouts: How the output is placed; default ``Replicate()``.
        use_local_output: Give this rank's plain piece; else a DTensor.
        unit: Cut whole units of so many features, as the `ColwiseParallel` before it does.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        unit: int | None = None,
    ) -> None:
        super().__init__(
            input_layouts or Shard(-1, unit=unit),
            None,
            output_layouts or Replicate(),
            use_local_output,
            unit,
        )

    def wanted(self, module: nn.Module) -> Placement:
        """A Linear takes its input cut, an Embedding whole."""
        return Replicate() if isinstance(module, nn.Embedding) else Shard(-1, unit=self.unit)

    def layouts(self, module: nn.Module) -> dict[str, Placement]:
        """Weight by input features, bias whole."""
        if isinstance(module, nn.Embedding):
            return {"weight": Shard(0, unit=self.unit)}
        return {"weight": Shard(1, unit=self.unit), "bias": Replicate()}


class SequenceParallel(ParallelStyle):
    """Run a norm or a dropout on pieces of the sequence; its parameters are whole.

    Args:
        sequence_dim: The dim that is cut.
        use_local_output: Give this rank's plain piece; else a DTensor.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_sharding = Shard(sequence_dim)
        self.use_local_output = use_local_output

    def layouts(self, module: nn.Module) -> dict[str, Placement]:
        """All whole."""
        return {name: Replicate() for name, _ in module.named_parameters(recurse=False)}

    def check(self, module: nn.Module, name: str) -> None:
        """The module must hold its parameters itself."""
        own = len(list(module.parameters(recurse=False)))
        if own != len(list(module.parameters())):
            raise LayoutError(
                f'SequenceParallel does not fit "{name}", whose submodules have parameters.',
                tries=["name the norms and dropouts themselves in the plan"],
            )

    def attach(self, module: nn.Module, mesh: Mesh) -> None:
        """Place the first argument and the result."""
        cut, local = self.sequence_sharding, self.use_local_output

        def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (entered(args[0], mesh, cut, cut, {}), *args[1:]) if args else args

        def after(_: nn.Module, args: tuple[Any, ...], y: DTensor) -> Tensor:
            return left(y, mesh, cut) if local else y

        module.register_forward_pre_hook(break_graph(before))
        module.register_forward_hook(break_graph(after))


def _each(layouts: Layouts) -> tuple[Placement | None, ...]:
    if layouts is None:
        return ()
    return (layouts,) if isinstance(layouts, Placement) else tuple(layouts)


def _pairs(what: str, given: Layouts, wanted: Layouts) -> list[tuple[Any, Any]]:
    """One (given, wanted) for each value."""
    a, b = _each(given), _each(wanted)
    if len(a) != len(b):
        raise LayoutError(
            f"{what}: {len(a)} layouts are given and {len(b)} are desired; one of each per value."
        )
    return list(zip(a, b))


def _taken(x: Any, mesh: Mesh, given: Any, wanted: Any, local: bool) -> Any:
    """One value that goes in."""
    if not isinstance(x, Tensor) or (given is None and not isinstance(x, DTensor)):
        return x
    if wanted is None:
        wanted = given
    if wanted is None:
        return x
    if local and given is not None and not isinstance(x, DTensor):
        return passed(x, mesh, given, wanted)
    out = entered(x, mesh, given or Replicate(), wanted, {})
    return left(out, mesh, wanted) if local else out


def _returned(y: Any, mesh: Mesh, given: Any, wanted: Any, local: bool) -> Any:
    """One value that comes out."""
    if not isinstance(y, Tensor) or given is None:
        return y
    if not isinstance(y, DTensor):
        if local:
            return passed(y, mesh, given, wanted)
        return entered(y, mesh, given, wanted, {})
    return (left if local else moved)(y, mesh, wanted)


class PrepareModuleInput(ParallelStyle):
    """Place what goes into a module.

    Args:
        input_layouts: For each positional argument how a plain tensor is placed, or None to leave it.
        desired_input_layouts: For each how the module wants it.
        input_kwarg_layouts: The same for keyword arguments, by name.
        desired_input_kwarg_layouts: The same, by name.
        use_local_output: Hand plain pieces on; else DTensors.
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_output: bool = False,
    ) -> None:
        self.pairs = _pairs("PrepareModuleInput", input_layouts, desired_input_layouts)
        given, wanted = input_kwarg_layouts or {}, desired_input_kwarg_layouts or {}
        if given.keys() != wanted.keys():
            odd = sorted(given.keys() ^ wanted.keys())
            raise LayoutError(
                f"PrepareModuleInput: keyword arguments {odd} have a given or a desired layout only."
            )
        self.named = {name: (given[name], wanted[name]) for name in given}
        self.use_local_output = use_local_output

    def attach(self, module: nn.Module, mesh: Mesh) -> None:
        """Place the arguments."""
        pairs, named, local = self.pairs, self.named, self.use_local_output

        def before(
            _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if pairs and len(args) != len(pairs):
                raise LayoutError(
                    f"PrepareModuleInput has layouts for {len(pairs)} arguments, "
                    f"the module was called with {len(args)}."
                )
            if pairs:
                args = tuple([_taken(x, mesh, g, w, local) for x, (g, w) in zip(args, pairs)])
            for name, (g, w) in named.items():
                if name in kwargs:
                    kwargs[name] = _taken(kwargs[name], mesh, g, w, local)
            return args, kwargs

        module.register_forward_pre_hook(break_graph(before), with_kwargs=True)


class PrepareModuleOutput(ParallelStyle):
    """Place what comes out of a module.

    Args:
        output_layouts: For each result how a plain tensor is placed, or None to leave it.
        desired_output_layouts: For each how it is wanted.
        use_local_output: Give plain pieces; else DTensors.
    """

    def __init__(
        self,
        *,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ) -> None:
        self.pairs = _pairs("PrepareModuleOutput", output_layouts, desired_output_layouts)
        self.use_local_output = use_local_output

    def attach(self, module: nn.Module, mesh: Mesh) -> None:
        """Place the results."""
        pairs, local = self.pairs, self.use_local_output

        def after(_: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
            several = isinstance(out, (tuple, list))
            values = list(out) if several else [out]
            if len(values) != len(pairs):
                raise LayoutError(
                    f"PrepareModuleOutput has layouts for {len(pairs)} results, "
                    f"the module gave {len(values)}."
                )
            done = [_returned(y, mesh, g, w, local) for y, (g, w) in zip(values, pairs)]
            return type(out)(done) if several else done[0]

        module.register_forward_hook(break_graph(after))


class PrepareModuleInputOutput(ParallelStyle):
    """Place what goes into a module and what comes out; see the two styles for the arguments."""

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def attach(self, module: nn.Module, mesh: Mesh) -> None:
        """Place arguments and results."""
        self.prepare_module_input.attach(module, mesh)
        self.prepare_module_output.attach(module, mesh)
