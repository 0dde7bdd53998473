"""The container of one tensor: the zip file that ``torch.save`` writes, made and opened without torch's reader.

A saved chunk is such a container, so that ``torch.distributed.checkpoint`` can read it. The elements lie in it
uncompressed and aligned, so that a part can be read without the rest.
"""

from __future__ import annotations

from collections import OrderedDict
import io
import math
import pickle
import struct
from typing import Any, NamedTuple
import zipfile
import zlib

import torch

from shardwise.compat import tensor_builders
from shardwise.layout.boxes import contiguous_stride

ALIGNMENT = 64
_LOCAL, _CENTRAL, _END = 0x04034B50, 0x02014B50, 0x06054B50
_END64, _LOCATOR64 = 0x06064B50, 0x07064B50
_MAX = 0xFFFFFFFF


# ---- making ----------------------------------------------------------------------------------------


class _Storage(NamedTuple):
    kind: Any
    numel: int


class _Tensor:
    """Pickles as torch pickles a contiguous tensor."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype

    def __reduce__(self) -> Any:
        build, kind, per_element, more = tensor_builders(self.dtype)
        numel = math.prod(self.shape) * per_element
        stride = contiguous_stride(self.shape)
        return build, (
            _Storage(kind, numel),
            0,
            self.shape,
            stride,
            False,
            OrderedDict(),
            *more,
        )


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            return "storage", obj.kind, "0", "cpu", obj.numel
        return None


def frame(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, bytes]:
    """What goes before and after the elements of a tensor to make the file that ``torch.save`` makes.

    The elements begin at a multiple of 64. Their CRC is left out, as ``torch.serialization.set_crc32_options``
    allows: torch does not check it, and it takes longer than the writing.
    """
    pickled = io.BytesIO()
    _Pickler(pickled, protocol=2).dump(_Tensor(tuple(shape), dtype))
    before = [
        ("data.pkl", pickled.getvalue()),
        (".format_version", b"1"),
        (".storage_alignment", str(ALIGNMENT).encode()),
        ("byteorder", b"little"),
    ]
    size = math.prod(shape) * dtype.itemsize
    head, tail, central = bytearray(), bytearray(), bytearray()
    count = 0
    for name, data in before:
        central += _central(name, len(data), zlib.crc32(data), len(head))
        head += _local(name, len(data), zlib.crc32(data), len(head))
        head += data
        count += 1
    central += _central("data/0", size, 0, len(head))
    head += _local("data/0", size, 0, len(head))
    for name, data in (("version", b"3\n"), (".data/serialization_id", b"0" * 40)):
        at = len(head) + size + len(tail)
        central += _central(name, len(data), zlib.crc32(data), at)
        tail += _local(name, len(data), zlib.crc32(data), at)
        tail += data
        count += 1
    at = len(head) + size + len(tail)
    tail += central + _end(count + 1, len(central), at)
    return bytes(head), bytes(tail)


def _local(name: str, size: int, crc: int, at: int) -> bytes:
    """A local header, padded so that what follows is aligned."""
    path = f"archive/{name}".encode()
    big = struct.pack("<HHQQ", 1, 16, size, size) if size >= _MAX else b""
    pad = -(at + 30 + len(path) + len(big) + 4) % ALIGNMENT
    extra = big + struct.pack("<2sH", b"FB", pad) + b"Z" * pad
    shown = min(size, _MAX)
    return struct.pack(
        "<IHHHHHIIIHH", _LOCAL, 45 if big else 0, 1 << 11, 0, 0, 0, crc, shown, shown, len(path), len(extra)
    ) + path + extra  # fmt: skip


def _central(name: str, size: int, crc: int, at: int) -> bytes:
    path = f"archive/{name}".encode()
    wide = [n for n in (size, size, at) if n >= _MAX]
    extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    shown, where = min(size, _MAX), min(at, _MAX)
    return struct.pack(
        "<IHHHHHHIIIHHHHHII", _CENTRAL, 45 if wide else 0, 45 if wide else 0, 1 << 11, 0, 0, 0, crc,
        shown, shown, len(path), len(extra), 0, 0, 0, 0, where,
    ) + path + extra  # fmt: skip


def _end(count: int, size: int, at: int) -> bytes:
    wide = b""
    if at >= _MAX:
        wide = struct.pack("<IQHHIIQQQQ", _END64, 44, 45, 45, 0, 0, count, count, size, at)
        wide += struct.pack("<IIQI", _LOCATOR64, 0, at + size, 1)
    return wide + struct.pack(
        "<IHHHHIIH", _END, 0, 0, count, count, min(size, _MAX), min(at, _MAX), 0
    )


# ---- opening ---------------------------------------------------------------------------------------


class _Found(NamedTuple):
    storage: Any
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any


class _Unpickler(pickle.Unpickler):
    """Reads what ``torch.save`` pickles of one plain tensor, and nothing else; nothing in it is called."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return _found
        if (module, name) == ("collections", "OrderedDict"):
            return lambda: None
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return name
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        return pid


def _found(*args: Any) -> _Found:
    storage, offset, shape, stride = args[:4]
    return _Found(
        storage, offset, tuple(shape), tuple(stride), args[6] if len(args) > 6 else None
    )


def elements_at(
    container: memoryview, shape: tuple[int, ...], dtype: torch.dtype
) -> int | None:
    """Where in a container the elements of a contiguous tensor begin.

    Returns:
        The byte offset; None if the container holds anything but that tensor, row-major and uncompressed.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(container)) as archive:
            names = archive.namelist()
            pickled = next(n for n in names if n.endswith("/data.pkl"))
            root = pickled.removesuffix("data.pkl")
            found = _Unpickler(io.BytesIO(archive.read(pickled))).load()
            if not isinstance(found, _Found) or archive.read(f"{root}byteorder") != b"little":
                return None
            record = archive.getinfo(f"{root}data/{found.storage[2]}")
    except (zipfile.BadZipFile, pickle.UnpicklingError, StopIteration, KeyError, IndexError):
        return None
    kind = str(found.storage[1])
    plain = found.shape == tuple(shape) and found.offset == 0
    if not plain or not _is_dense(found.shape, found.stride) or record.compress_type:
        return None
    if kind != tensor_builders(dtype)[1].__name__ or found.dtype not in (None, dtype):
        return None
    size = math.prod(shape) * dtype.itemsize
    at = record.header_offset
    name, extra = struct.unpack("<HH", container[at + 26 : at + 30])
    start = at + 30 + name + extra
    return start if record.file_size >= size and start + size <= len(container) else None


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    return 0 in shape or all(
        n == 1 or s == want for n, s, want in zip(shape, stride, contiguous_stride(shape))
    )
