"""What the demo shows: progress bars, a table of the two runs, a picture of losses and placements."""

from collections import Counter
import statistics

import matplotlib as mpl
from matplotlib.patches import Rectangle
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

mpl.use("Agg")  # draw into files; before pyplot is imported
import matplotlib.pyplot as plt

DRAWN = ("tok", "pos", *(f"blocks.0.{name}" for name in ("q", "k", "v", "o", "up", "down")))


class Bars:
    """One progress bar for each run; a context manager."""

    def __init__(self, steps, show):
        self.steps = steps
        name = TextColumn("{task.description:>8}")
        columns = name, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        self.progress = Progress(*columns, disable=not show)

    def __enter__(self):
        self.progress.start()

    def __exit__(self, *_):
        self.progress.stop()

    def tick(self, name):
        """A new bar, and the function that moves it on by a step."""
        task = self.progress.add_task(name, total=self.steps)
        return lambda: self.progress.advance(task)


def table(plain, sharded, tokens):
    """Losses side by side, speeds, and what one rank sends in a step, as text.

    Args:
        plain: The run on one device.
        sharded: The run on the mesh.
        tokens: Number of tokens in a step.
    """
    lines = ["", "  step   plain loss   sharded loss   relative difference"]
    steps = len(plain.losses)
    for i in sorted({*range(0, steps, max(steps // 10, 1)), steps - 1}):
        a, b = plain.losses[i], sharded.losses[i]
        lines.append(f"{i + 1:6d} {a:12.6f} {b:14.6f} {abs(a - b) / abs(a):21.1e}")
    speeds = [f"{tokens / statistics.median(run.seconds):,.0f}" for run in (plain, sharded)]
    lines += ["", f"tokens per second: {speeds[0]} plain, {speeds[1]} sharded"]
    log = sharded.log
    lines.append(f"one step, rank 0: {log.count()} collectives, {log.bytes:,} bytes received")
    calls, size = Counter(), Counter()
    for event in log.events:
        key = event.kind, event.tag or f"ranks {event.ranks}"
        calls[key] += 1
        size[key] += event.bytes
    for (kind, axes), n in calls.most_common():
        lines.append(f"{n:6d} {kind} over {axes}: {size[kind, axes]:,} bytes")
    return "\n".join([*lines, ""])


def picture(plain, sharded, folder):
    """Draw both loss curves, and which ranks hold which part of the weights; returns the file."""
    mosaic = [["loss"] * 3 + list(DRAWN[:4]), ["loss"] * 3 + list(DRAWN[4:])]
    figure, axes = plt.subplot_mosaic(mosaic, figsize=(13, 5), layout="constrained")
    steps = range(1, len(plain.losses) + 1)
    ax = axes["loss"]
    ax.plot(steps, plain.losses, color="C0", lw=6, alpha=0.35, label="plain torch, one device")
    ax.plot(steps, sharded.losses, color="C3", lw=1.2, label="sharded")
    ax.set(xlabel="step", ylabel="loss", title="One model, trained twice")
    ax.legend()
    note = "weights: R is whole, S(d) cut along dim d, over dp and tp; numbers are the ranks"
    figure.suptitle(note, fontsize=9, x=0.98, ha="right")
    for name in DRAWN:
        _weight(axes[name], name, sharded.layouts[f"{name}.weight"])
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "gpt.png", dpi=110)
    plt.close(figure)
    return folder / "gpt.png"


def _weight(ax, name, layout):
    """A matrix to scale, cut as it is, with the ranks that hold each part."""
    held = {}
    for rank, coord in zip(layout.mesh.ranks, layout.mesh.coordinates()):
        held.setdefault(layout.box(coord), []).append(rank)
    for i, (((top, left), (height, width)), ranks) in enumerate(held.items()):
        color = f"C{i}" if len(held) > 1 else "0.7"  # grey: every rank holds all of it
        look = {"facecolor": color, "edgecolor": "white", "alpha": 0.5}
        ax.add_patch(Rectangle((left, top), width, height, **look))
        middle = left + width / 2, top + height / 2
        ax.text(*middle, ", ".join(map(str, ranks)), ha="center", va="center", fontsize=8)
    rows, columns = layout.shape
    ax.set(xlim=(0, columns), ylim=(rows, 0), aspect="equal", xticks=[columns], yticks=[rows])
    ax.set_title(f"{name}\n{', '.join(map(str, layout.placements))}", fontsize=8)
