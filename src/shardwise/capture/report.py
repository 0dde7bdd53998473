"""What a captured step sends, before and after each pass, in a table."""

from __future__ import annotations

from collections import Counter
from typing import Any

from shardwise.capture.ir import Node, Step
from shardwise.events import received_bytes


def sent_bytes(start: Node) -> int:
    """Bytes that this rank receives in a collective: what the log will count."""
    info = start.info
    value = start.args[0]
    if info["kind"] == "all_to_all":
        here = info["out_splits"][info["ranks"].index(info["transport"].rank)]
        return (sum(info["out_splits"]) - here) * value.fake.element_size()
    if info["kind"] == "broadcast" and info["src"] == info["transport"].rank:
        return 0
    return received_bytes(info["kind"], value.nbytes, len(info["ranks"]))


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
    """What a captured function's last step does: each pass with what it changed, then every collective.

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
    lines = _table(cells)
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
