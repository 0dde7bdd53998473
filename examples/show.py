"""What the examples show: progress bars, a table of two runs, a picture of losses and placements."""

from collections import Counter
import statistics

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Bars:
    """One progress bar for each run; a context manager."""

    def __init__(self, steps, show):
        self.steps = steps
        self.progress = Progress(
            TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), disable=not show
        )

    def __enter__(self):
        self.progress.start()

    def __exit__(self, *_):
        self.progress.stop()

    def tick(self, name):
        """A function that moves the bar ``name`` on by a step; the bar appears at the first."""
        task = self.progress.add_task(name, total=self.steps)
        return lambda: self.progress.advance(task)


def table(plain, sharded, tokens):
    """Losses side by side, speeds, and what one rank received in a step, as text."""
    lines = ["", "  step   plain loss   sharded loss   relative difference"]
    steps = len(plain.losses)
    for i in sorted({*range(0, steps, max(steps // 10, 1)), steps - 1}):
        a, b = plain.losses[i], sharded.losses[i]
        lines.append(f"{i + 1:6d} {a:12.6f} {b:14.6f} {abs(a - b) / abs(a):21.1e}")
    speed = [tokens / statistics.median(run.seconds) for run in (plain, sharded)]
    lines += ["", f"tokens per second: {speed[0]:,.0f} plain, {speed[1]:,.0f} sharded"]
    lines += [f"one step, rank 0: {sharded.log.count()} collectives, {sharded.log.bytes:,} bytes received"]
    calls, size = Counter(), Counter()
    for event in sharded.log.events:
        kind = event.kind, event.tag
        calls[kind] += 1
        size[kind] += event.bytes
    for (kind, axes), count in calls.most_common():
        lines.append(f"{count:6d} {kind} over {axes or 'a group'}: {size[kind, axes]:,} bytes")
    return "\n".join([*lines, ""])


def picture(plain, sharded, folder):
    """Draw both loss curves, and for each kind of weight which ranks hold which part of it."""
    import matplotlib as mpl

    mpl.use("Agg")  # no window
    import matplotlib.pyplot as plt

    # One weight of each kind: the blocks are alike.
    layouts = {n: x for n, x in sharded.layouts.items() if len(x.shape) == 2 and "blocks.1" not in n}
    layouts = {n.removeprefix("blocks.0.").removesuffix(".weight"): x for n, x in layouts.items() if "blocks." not in n or "blocks.0." in n}
    figure, axes = plt.subplot_mosaic(
        [["loss"] * 3 + list(layouts)[:4], ["loss"] * 3 + list(layouts)[4:8]], figsize=(13, 5), layout="constrained"
    )
    ax = axes["loss"]
    ax.plot(plain.losses, color="C0", lw=6, alpha=0.35, label="plain torch, one device")
    ax.plot(sharded.losses, color="C3", lw=1.2, label="sharded")
    ax.set(xlabel="step", ylabel="loss", title="The same model, the same dropout")
    ax.legend()
    for name, layout in layouts.items():
        _draw(axes[name], name, layout)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "gpt.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _draw(ax, name, layout):
    """A matrix to scale, cut as it is, with the ranks that hold each part."""
    boxes = {}
    for rank, coord in zip(layout.mesh.ranks, layout.mesh.coordinates()):
        boxes.setdefault(layout.box(coord), []).append(rank)
    rows, columns = layout.shape
    for i, (((top, left), (height, width)), ranks) in enumerate(boxes.items()):
        ax.add_patch(_rectangle(left, top, width, height, f"C{i}" if len(boxes) > 1 else "0.7"))
        ax.text(left + width / 2, top + height / 2, ", ".join(map(str, ranks)), ha="center", va="center", fontsize=8)
    ax.set(xlim=(0, columns), ylim=(rows, 0), aspect="equal", xticks=[columns], yticks=[rows])
    ax.set_title(f"{name}\n{', '.join(map(str, layout.placements))}", fontsize=8)


def _rectangle(x, y, width, height, color):
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, facecolor=color, edgecolor="white", alpha=0.5)
