"""The command line: ``shardwise checkpoint inspect PATH`` and ``shardwise checkpoint convert SOURCE TARGET``.

It needs typer and rich: ``pip install 'shardwise[cli]'``. The library itself does not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch

from shardwise.checkpoint.convert import convert, verify
from shardwise.checkpoint.opening import open_checkpoint
from shardwise.checkpoint.records import Index, TensorEntry
from shardwise.errors import ShardError

try:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.table import Table
    import typer
except ImportError as error:
    raise SystemExit(
        f"the command line of shardwise needs {error.name}: pip install 'shardwise[cli]'"
    ) from error

app = typer.Typer(help="Distributed tensors for PyTorch.", no_args_is_help=True)
checkpoints = typer.Typer(help="Look at checkpoints, and convert them.", no_args_is_help=True)
app.add_typer(checkpoints, name="checkpoint")

_Source = Annotated[Path, typer.Argument(help="Folder of a checkpoint, or a safetensors file.")]


@app.callback()
def _top() -> None:
    """Distributed tensors for PyTorch."""


@checkpoints.command("inspect")
def inspect_command(
    path: _Source,
    check: Annotated[
        bool, typer.Option("--verify", help="Read everything and compare checksums.")
    ] = False,
) -> None:
    """Keys, shapes, layouts and sizes of a checkpoint."""
    console = Console()
    with _told(console):
        reader, index = open_checkpoint(path)
        console.print(_table(index))
        console.print(_summary(index))
        if check:
            total = sum(entry.nbytes for _, entry in index.tensors())
            with _progress(console) as bar:
                task = bar.add_task("verifying", total=total)
                report = verify(reader, index, lambda n: bar.advance(task, n))
            for problem in report.problems:
                console.print(f"[red]damaged[/red] {problem}", highlight=False)
            if report.problems:
                raise typer.Exit(1)
            unchecked = f", {report.unchecked} without a checksum" if report.unchecked else ""
            console.print(f"every file is whole: {report.checked} pieces right{unchecked}")


@checkpoints.command("convert")
def convert_command(
    source: _Source,
    target: Annotated[Path, typer.Argument(help="What to write; see --to.")],
    to: Annotated[
        str, typer.Option("--to", help="dcp or safetensors; else what the source is not.")
    ] = "",
    keys: Annotated[
        list[str] | None,
        typer.Option("--keys", help="Only keys that match, such as 'model.*'."),
    ] = None,
    strip: Annotated[str, typer.Option("--strip", help="A prefix to take off the keys.")] = "",
    max_shard_gb: Annotated[
        float, typer.Option("--max-shard-gb", help="Largest safetensors file.")
    ] = 5.0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what is there.")
    ] = False,
) -> None:
    """Convert between torch.distributed.checkpoint's form and safetensors, block by block."""
    console = Console()
    with _told(console), _progress(console) as bar:
        task = bar.add_task("converting", total=None)
        written = convert(
            source,
            target,
            to=to,
            keys=keys,
            strip=strip,
            max_shard_bytes=int(max_shard_gb * 1e9),
            overwrite=overwrite,
            progress=lambda n, total: bar.update(task, advance=n, total=total),
        )
    console.print(f"wrote {written.path}: {written.tensors} tensors, {_size(written.nbytes)}")
    for key in written.left_out:
        console.print(f"left out {key}: it is no tensor", highlight=False)


class _told:  # noqa: N801  reads as a statement
    """An error of ours ends the command with its message and no traceback."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, ShardError):
            self._console.print(f"[red]error[/red] {error}", highlight=False)
            raise typer.Exit(1) from None


def _progress(console: Console) -> Progress:
    return Progress(
        "[progress.description]{task.description}",
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def _table(index: Index) -> Table:
    table = Table(title=index.folder, title_justify="left")
    for name in ("key", "dtype", "shape", "layout when saved"):
        table.add_column(name, overflow="fold")
    for name in ("size", "chunks"):
        table.add_column(name, justify="right")
    for key, entry in index.entries.items():
        if isinstance(entry, TensorEntry):
            dtype = str(entry.dtype).removeprefix("torch.")
            where = entry.layout.partition("{")[2].rstrip("}")
            shape = str(list(entry.shape))
            table.add_row(key, dtype, shape, where, _size(entry.nbytes), str(len(entry.chunks)))
        else:
            table.add_row(key, "object", "", "", _size(entry.item.length), "")
    return table


def _summary(index: Index) -> str:
    stored = {c.item: c.item.length for _, e in index.tensors() for c in e.chunks}
    elements = sum(torch.Size(e.shape).numel() for _, e in index.tensors())
    ranks = f", written by {index.world_size} ranks" if index.world_size else ""
    return (
        f"{index.kind}: {len(index.entries)} keys, {elements:,} elements, "
        f"{_size(sum(stored.values()))} in {len({i.file for i in stored})} files{ranks}"
    )


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def main() -> None:
    """What the command ``shardwise`` runs."""
    app()
