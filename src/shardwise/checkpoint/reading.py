"""The stored blocks that are needed: which rank requests which part of each, and whether all of it is right.

```text
   block    contiguous in the file, with one checksum
   part     what one rank requests of it: all of it, or, where several ranks need different parts,
            what that rank needs
```

A part is read where it is needed, so that nothing of it has to be sent, if its bytes are one stretch of the
file, or if all the ranks that share the block share a machine, whose memory then holds the file's pages once.
Else one rank reads the whole block. Either way each byte is requested by one rank.

The checksum of a block in parts is found together: each rank adds up what it has, and one rank adds these
sums, a few kilobytes for a block of 4 MiB.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
import io
import itertools
import math

import torch
from torch import Tensor

from shardwise.checkpoint.exchange import Transfer, exchange, rounds
from shardwise.checkpoint.records import Block, TensorEntry, blocks_of
from shardwise.checkpoint.storage import Reader, attempt
from shardwise.checkpoint.sums import Stripe, checksum, part_sums, sum_up, sums_length
from shardwise.checkpoint.world import Spread, owner, shared, wire_device
from shardwise.comm.transport import Transport
from shardwise.errors import CheckpointError
from shardwise.layout.boxes import Box, overlap

_LEAST_PART = 1 << 18  # bytes; the sums of a block are 12 KiB for each 4 MiB


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank requests of a block.

    Attributes:
        block: The number of the block.
        box: What of the tensor.
        rank: The rank.
        stripe: Which bytes of the block; None if all of them.
    """

    block: int
    box: Box
    rank: int
    stripe: Stripe | None = None


# ---- who reads what --------------------------------------------------------------------------------


def requests(
    entries: Mapping[str, TensorEntry], wanted: Mapping[str, Spread], machines: list[str]
) -> tuple[list[Block], list[Part]]:
    """The blocks of which somebody needs something, and who requests what of each.

    Args:
        entries: What is stored.
        wanted: Which ranks want which boxes of it.
        machines: For each rank what tells its machine from all others.

    Raises:
        CheckpointError: The chunks of a tensor do not cover it.
    """
    blocks: list[Block] = []
    parts: list[Part] = []
    load = [0] * len(machines)
    for key, spread in wanted.items():
        entry = entries[key]
        held = sum(math.prod(c.box[1]) for c in entry.chunks)
        if held != math.prod(entry.shape):
            raise CheckpointError(
                f"{key}: the stored chunks hold {held} of {math.prod(entry.shape)} elements."
            )
        for chunk in entry.chunks:
            for block in blocks_of(key, entry, chunk) if 0 not in chunk.box[1] else ():
                needs = shared(block.box, spread.boxes)
                if needs:
                    parts += _parts(len(blocks), block, needs, machines, load)
                    blocks.append(block)
    return blocks, parts


def _parts(
    number: int,
    block: Block,
    needs: list[tuple[Box, list[int]]],
    machines: list[str],
    load: list[int],
) -> list[Part]:
    """Who reads a block: who needs a part of it that part, or one rank all of it."""
    stripes = _stripes(block, needs, machines)
    if not stripes:
        return [Part(number, block.box, owner(block.nbytes, needs, load))]
    return [
        Part(number, need[0], owner(stripe.nbytes, [need], load), stripe)
        for need, stripe in zip(needs, stripes)
    ]


def _stripes(
    block: Block, needs: list[tuple[Box, list[int]]], machines: list[str]
) -> list[Stripe]:
    """The bytes of each box of a block, if it is to be read in parts."""
    most = block.nbytes // _LEAST_PART
    if block.opaque or block.start % 8 or not 1 < len(needs) <= most:
        return []
    boxes = [box for box, _ in needs]
    if sum(math.prod(sizes) for _, sizes in boxes) != math.prod(block.box[1]):
        return []
    if any(overlap(a, b) for a, b in itertools.combinations(boxes, 2)):
        return []
    stripes = [_stripe(block, box) for box in boxes]
    found = [s for s in stripes if s is not None and s.nbytes >= _LEAST_PART]
    if len(found) < len(stripes):
        return []
    near = len({machines[r] for _, ranks in needs for r in ranks}) == 1
    return found if near or all(s.count == 1 for s in found) else []


def _stripe(block: Block, box: Box) -> Stripe | None:
    """The bytes of a box that is cut in one dim only."""
    base, sizes = block.box
    cut = [d for d, n in enumerate(box[1]) if n != sizes[d]]
    if len(cut) != 1:
        return None
    dim = cut[0]
    inner = math.prod(sizes[dim + 1 :]) * block.dtype.itemsize
    begin = (box[0][dim] - base[dim]) * inner
    return Stripe(math.prod(sizes[:dim]), begin, begin + box[1][dim] * inner)


# ---- read and checked --------------------------------------------------------------------------------


@dataclass(slots=True)
class Read:
    """What this rank found: the values of opaque blocks, and what is wrong."""

    whole: dict[int, Tensor] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


def read(
    transport: Transport,
    reader: Reader,
    blocks: list[Block],
    parts: list[Part],
    verify: bool,
    budget: int,
) -> Read:
    """Request this rank's parts, and check all of them with the other ranks; no rank raises.

    Args:
        transport: This rank's transport.
        reader: The files.
        blocks: From `requests`.
        parts: From `requests`.
        verify: Whether to compare checksums.
        budget: Bytes of sums that a rank sends or receives at a time.
    """
    found = Read()
    rank = transport.rank
    for part in parts:
        block = blocks[part.block]
        if part.rank != rank or (part.stripe and verify and block.sum):
            continue
        values, error = attempt(lambda p=part, b=block: _one(reader, p, b, verify), block.file)
        if error:
            found.errors.append(error)
        elif values is not None:
            found.whole[part.block] = values
    if verify:
        _add_up(transport, reader, blocks, parts, found, budget)
    return found


def _one(reader: Reader, part: Part, block: Block, verify: bool) -> Tensor | None:
    if part.stripe is not None:
        _requested(reader, block, part.stripe)
        return None
    data = _checked(reader, block, verify)
    return whole_chunk(reader, block, data) if block.opaque else None


def _add_up(
    transport: Transport,
    reader: Reader,
    blocks: list[Block],
    parts: list[Part],
    found: Read,
    budget: int,
) -> None:
    """Check the blocks that are read in parts: one of their readers adds up what all of them find."""
    number = {p.block: 0 for p in parts if p.stripe is not None and blocks[p.block].sum}
    missing = dict(number)
    for p in parts:
        if p.block in missing:
            missing[p.block] += 1
    checker: dict[int, int] = {}
    work = []
    for i, part in enumerate(parts):
        if part.block not in missing:
            continue
        turn = number[part.block]
        number[part.block] += 1
        if turn == part.block % missing[part.block]:
            checker[part.block] = part.rank
        work.append((i, part))
    sums: dict[int, Tensor] = {}

    def fetch(t: Transfer) -> Tensor:
        part = parts[t.source]
        block = blocks[part.block]
        assert part.stripe is not None, "only what is read in parts is added up"
        stripe = part.stripe
        out = torch.zeros(t.box[1], dtype=torch.int64)
        part_of, error = attempt(
            lambda: part_sums(_requested(reader, block, stripe), stripe), block.file
        )
        if error:
            found.errors.append(error)
            out[-1] = 1  # so that nobody takes it for damage
        else:
            out[:-1] = part_of
        return out

    def store(t: Transfer, piece: Tensor) -> None:
        at = parts[t.source].block
        block = blocks[at]
        piece = piece.cpu()
        sums[at] = sums[at] + piece if at in sums else piece.clone()
        missing[at] -= 1
        if missing[at]:
            return
        total = sums.pop(at)
        if not total[-1] and sum_up(block.nbytes, total[:-1]) != block.sum:
            found.errors.append(damaged(reader, block.key, block.file, block.start))

    transfers = []
    for i, part in work:
        words = sums_length(blocks[part.block].nbytes) + 1
        box = (0,), (words,)
        to, nbytes = checker[part.block], 8 * words + -8 * words % 16
        transfers.append(Transfer(i, "", box, part.rank, to, torch.int64, nbytes))
    exchange(
        transport,
        rounds(transfers, transport.world_size, budget),
        fetch,
        store,
        wire_device(transport),
    )


def _requested(reader: Reader, block: Block, stripe: Stripe) -> Tensor:
    """The bytes of a block, of which those of a stripe are asked for."""
    where = block.start, block.nbytes
    try:
        return reader.request_stretches(
            block.file, where, "elements", stripe.count, stripe.begin, stripe.end
        )
    except CheckpointError as error:
        raise CheckpointError(f"{block.key}: {error}") from error


def _checked(reader: Reader, block: Block, verify: bool) -> Tensor:
    """The bytes of a block, checked."""
    try:
        data = reader.request(block.file, block.start, block.nbytes, "elements")
    except CheckpointError as error:
        raise CheckpointError(f"{block.key}: {error}") from error
    if verify and block.sum and checksum(data) != block.sum:
        raise CheckpointError(damaged(reader, block.key, block.file, block.start))
    return data


def damaged(reader: Reader, key: str, file: str, at: int) -> str:
    """What is said of a wrong checksum."""
    return f"{reader.folder / file}, {key}: damaged at byte {at}: the checksum is wrong."


# ---- the elements ------------------------------------------------------------------------------------


def block_values(reader: Reader, block: Block, verify: bool = True) -> Tensor:
    """The elements of a block, checked.

    Raises:
        CheckpointError: It is damaged.
    """
    data = _checked(reader, block, verify)
    return whole_chunk(reader, block, data) if block.opaque else elements(block, data)


def elements(block: Block, data: Tensor) -> Tensor:
    """The bytes of a block as the values of its box."""
    if block.start % block.dtype.itemsize:  # as torch and others write
        data = data.clone()
    return data.view(block.dtype).view(block.box[1])


def whole_chunk(reader: Reader, block: Block, data: Tensor) -> Tensor:
    """The value in the container of an opaque chunk."""
    try:
        value = torch.load(
            io.BytesIO(data.numpy().tobytes()), weights_only=True, map_location="cpu"
        )
    except Exception as error:  # torch raises what the damage makes it raise
        reason = str(error).split("\n", 1)[0]
        raise CheckpointError(
            f"{reader.folder / block.file}, {block.key}: cannot be read: {type(error).__name__}: {reason}"
        ) from error
    if (
        not isinstance(value, Tensor)
        or tuple(value.shape) != block.box[1]
        or value.dtype != block.dtype
    ):
        raise CheckpointError(
            f"{reader.folder / block.file}, {block.key}: holds something else than a "
            f"{block.dtype} tensor of shape {block.box[1]}."
        )
    return value.detach()
