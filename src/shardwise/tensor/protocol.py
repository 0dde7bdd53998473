"""What can be read off a DTensor: its metadata, and what Python and numpy ask of a tensor.

Numbers, lists, text, arrays and addresses. Values are reduced or gathered first, on all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.compat import called_by_stager
from shardwise.errors import AliasError, GradientError, MeshError, ShardError, UnsupportedError
from shardwise.layout.layout import Layout
from shardwise.layout.mesh import Mesh
from shardwise.layout.placement import Placement
from shardwise.program.spec import Spec
from shardwise.tensor.explain import explained


class Protocol(torch.Tensor):
    """The part of ``DTensor`` that is read: metadata without a call, values for Python."""

    _local: Tensor
    _spec: Spec
    full_tensor: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Protocol:
        """Refused: a piece alone does not say what it is a piece of."""
        raise UnsupportedError(
            "a DTensor is not made by calling its class.",
            tries=[
                "DTensor.from_local(piece, mesh, placements)",
                "distribute_tensor(whole, mesh, placements)",
            ],
        )

    # -- what is where ---------------------------------------------------------------------------
    @property
    def device_mesh(self) -> Mesh:
        """The mesh."""
        return self._spec.layout.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh axis."""
        return self._spec.layout.placements

    @property
    def layout(self) -> Layout:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The layout: accepted wherever placements are."""
        return self._spec.layout

    @property
    def _local_tensor(self) -> Tensor:
        """The local piece, under torch's private name (no autograd edge)."""
        return self._local

    # -- metadata, read without a call -------------------------------------------------------------
    @property
    def shape(self) -> torch.Size:
        """Global shape."""
        return self._spec.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype."""
        return self._spec.dtype

    @property
    def device(self) -> torch.device:
        """Device of the local piece."""
        return self._local.device

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self._spec.shape)

    @property
    def is_sparse(self) -> bool:
        """Never: the pieces are strided."""
        return False

    def dim(self) -> int:
        """Number of dims."""
        return len(self._spec.shape)

    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return self._spec.shape.numel()

    def size(self, dim: int | None = None) -> Any:
        """Global shape, or one of its entries."""
        return self._spec.shape if dim is None else self._spec.shape[dim]

    def __len__(self) -> int:
        """Size of the first dim."""
        if not self._spec.shape:
            raise ShardError("len() of a 0-d tensor")
        return self._spec.shape[0]

    # -- values, for Python ----------------------------------------------------------------------
    def __hash__(self) -> int:
        """By identity, as torch's."""
        return id(self)

    def __bool__(self) -> bool:
        """Truth of a one-element tensor."""
        return bool(self.item())

    def __float__(self) -> float:
        """Value of a one-element tensor."""
        return float(self.item())

    def __int__(self) -> int:
        """Value of a one-element tensor."""
        return int(self.item())

    def __index__(self) -> int:
        """Value of a one-element integer tensor."""
        value = self.item()
        if not isinstance(value, int):
            raise ShardError(
                "only integer tensors of a single element can be converted to an index"
            )
        return int(value)

    def __complex__(self) -> complex:
        """Value of a one-element tensor."""
        return complex(self.item())

    def __round__(self, ndigits: int | None = None) -> Any:
        """Rounded elementwise."""
        return torch.round(self) if ndigits is None else torch.round(self, decimals=ndigits)

    @explained("Tensor.item", "self")
    def item(self) -> Any:
        """Value of a one-element tensor; reduces or gathers first, on all ranks."""
        if self._spec.shape.numel() != 1:
            raise ShardError(
                f"item() of a tensor of shape {tuple(self.shape)}: only one element can be a number."
            )
        if self._spec.coord is None:
            raise MeshError(
                f"rank {self._spec.transport.rank} is not on {self.device_mesh}: it has no value to read."
            )
        value: Any = self.detach()
        return value.full_tensor().item()

    def tolist(self) -> Any:
        """The whole value as nested lists."""
        value: Any = self.detach()
        return value.full_tensor().tolist()

    def __format__(self, spec: str) -> str:
        """Format a 0-d tensor as its number."""
        return self.item().__format__(spec) if self.ndim == 0 else object.__format__(self, spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The local piece, the mesh and the placements; never communicates."""
        where = ", ".join(map(repr, self.placements))
        local = self._local.detach()
        return f"DTensor(local_tensor={local}, shape={tuple(self.shape)}, device_mesh={self.device_mesh}, placements=({where}))"

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """The whole value as a numpy array."""
        if self._local.requires_grad:
            raise GradientError(
                "numpy would lose the gradient of this tensor.", tries=["x.detach()"]
            )
        value: Any = self.detach()
        array = value.full_tensor().cpu().numpy()
        return array if dtype is None else array.astype(dtype)

    @explained("Tensor.numpy", "self")
    def numpy(self, *, force: bool = False) -> Any:
        """A numpy view, of a tensor that every rank holds whole.

        Raises:
            AliasError: The tensor is sharded or has a pending reduction.
        """
        if not self._spec.layout.is_replicated:
            raise AliasError(
                "numpy() would alias one piece.",
                tries=[
                    "x.full_tensor().numpy(): the whole value",
                    "x.to_local().numpy(): this rank's piece",
                ],
            )
        return self._local.numpy(force=force)

    @explained("Tensor.data_ptr", "self")
    def data_ptr(self) -> int:
        """Address of the data, of a tensor that every rank holds whole.

        Raises:
            AliasError: The tensor is sharded or has a pending reduction.
        """
        if called_by_stager(2):
            return 0  # a wrapper: what it holds is copied
        if not self._spec.layout.is_replicated:
            raise AliasError(
                "data_ptr() would be that of one piece.",
                tries=["x.to_local().data_ptr(): this rank's piece"],
            )
        return self._local.data_ptr()
