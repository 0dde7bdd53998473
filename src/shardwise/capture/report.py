"""What a captured step sends, before and after each pass, in a table."""

from __future__ import annotations

from collections import Counter
from typing import Any

from shardwise.capture.ir import Step, sent_bytes
from shardwise.capture.timeline import timeline


def summary(step: Step) -> dict[str, Any]:
    """Nodes, collectives by kind, and bytes received on this rank in one run.

    Returns:
        ``{"nodes": 103, "collectives": {"all_reduce": 2}, "bytes": 864}``.
    """
    starts = step.collectives()
    return {
        "nodes": sum(1 for _ in step.lowered().nodes),
        "collectives": dict(Counter(n.info["kind"] for n in starts)),
        "bytes": sum(map(sent_bytes, starts)),
    }


def explain(captured: Any) -> str:
    """What a captured function's last step does: each pass with what it changed, overlap and memory, every collective.

    Times and memory are estimates: `shardwise.capture.timeline` simulates the step with what is known of the mesh.

    Args:
        captured: What `capture` returned, after its second call; or one of its steps.

    Returns:
        A text of several lines.

    Raises:
        CaptureError: Nothing is captured yet.
    """
    one = captured.last if hasattr(captured, "last") else captured
    rows = [("recorded", summary(one.recording.step))]
    rows += [(name, summary(step)) for name, step in one.log]
    cells = [("pass", "nodes", "collectives", "bytes received")]
    for name, facts in rows:
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(facts["collectives"].items()))
        cells.append((name, str(facts["nodes"]), kinds or "none", str(facts["bytes"])))
    lines = [*_table(cells), ""]
    estimates: list[tuple[str, ...]] = [
        ("estimated", "total us", "compute", "collectives", "exposed", "peak bytes")
    ]
    for name, step in (("as recorded", one.recording.step), ("after passes", one.step)):
        t = timeline(step)
        times = (t.total_us, t.compute_us, t.communication_us, t.exposed_us, t.peak_bytes)
        estimates.append((name, *(f"{x:.0f}" for x in times)))
    lines += _table(estimates)
    starts = one.step.collectives()
    if starts:
        cells = [("collective", "over", "bytes received", "carries", "at")]
        for n in starts:
            info = n.info
            what = f"{info['kind']} {info.get('op', '')}".strip()
            cells.append(
                (
                    what,
                    info.get("tag") or str(list(info["ranks"])),
                    str(sent_bytes(n)),
                    str(info.get("members", 1)),
                    "/".join(n.site.split("/")[-2:]),
                )
            )
        lines += ["", *_table(cells)]
    made = one.compiled
    if made is not None:
        sizes = ", ".join(map(str, made.parts))
        lines += [
            "",
            f"compiled: {len(made.parts)} parts of {sizes} calls, in {made.seconds:.1f} s; "
            f"between them {made.loose} calls run one by one",
        ]
    loose = [slot for _, slot in one.step.inputs if slot.role == "closed-over"]
    if loose:
        lines += [
            "",
            f"{len(loose)} tensors are held as they were: later assignments to their names are not seen.",
        ]
    return "\n".join(lines)


def _table(cells: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(t.ljust(w) for t, w in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
