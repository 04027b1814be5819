"""Tables for people and JSON for machines. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from benchmarks.stats import Comparison, Growth, best_per_s, best_us, is_flat, median_us

_MIB: Final = 1024 * 1024
_HEAD: Final = (
    "case",
    "per",
    "ratio",
    "median",
    "aim",
    "",
    "gateway us",
    "haproxy us",
    "gateway/s",
    "haproxy/s",
    "direct/s",
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one case.

    Attributes:
        name: The case's name.
        title: What the table calls it.
        item: What figures are per.
        aim: Highest ratio aimed at.
        result: The measurement, ``None`` if it failed.
        error: Why it failed.
    """

    name: str
    title: str
    item: str
    aim: float | None
    result: Comparison | Growth | None = None
    error: str | None = None

    @property
    def is_met(self) -> bool | None:
        """Whether the aim is met, by the median of the rounds; ``None`` without an aim or a result."""
        if isinstance(self.result, Growth):
            return is_flat(self.result)
        if self.result is None or self.aim is None:
            return None
        return self.result.median_ratio <= self.aim


def _word(is_met: bool | None) -> str:
    return {True: "met", False: "missed", None: ""}[is_met]


def rows(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """The comparison's rows, head first; cases without one are left out."""
    lines: list[tuple[str, ...]] = [_HEAD]
    for outcome in outcomes:
        result = outcome.result
        if not isinstance(result, Comparison):
            continue
        lines.append(
            (
                outcome.title,
                outcome.item,
                f"{result.ratio:.2f}",
                f"{result.median_ratio:.2f}",
                f"<= {outcome.aim:g}" if outcome.aim is not None else "-",
                _word(outcome.is_met),
                f"{best_us(result.gateway):.1f} ({median_us(result.gateway):.1f})",
                f"{best_us(result.haproxy):.1f} ({median_us(result.haproxy):.1f})",
                f"{best_per_s(result.gateway):.0f}",
                f"{best_per_s(result.haproxy):.0f}",
                f"{best_per_s(result.direct):.0f}",
            )
        )
    return lines


def table(lines: Sequence[Sequence[str]]) -> str:
    """Columns of equal width; the first two to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index < 2 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def text(outcomes: Sequence[Outcome]) -> str:
    """All that is printed at the end."""
    parts = []
    lines = rows(outcomes)
    if len(lines) > 1:
        parts.append(table(lines))
        parts.append(
            "ratio: CPU of the gateway / CPU of haproxy, best of the rounds; median: of the rounds' own ratios"
        )
        parts.append("us: best (median) of the rounds; an aim is met by the median")
    for outcome in outcomes:
        if isinstance(outcome.result, Growth):
            parts.append(_growth_text(outcome.title, outcome.result, outcome.is_met))
        elif outcome.error is not None:
            parts.append(f"{outcome.title}: FAILED: {outcome.error}")
        elif isinstance(outcome.result, Comparison) and outcome.result.disturbed_rounds:
            count = outcome.result.disturbed_rounds
            parts.append(f"{outcome.title}: the core was shared with other work in {count} samples")
    return "\n".join(parts)


def _growth_text(title: str, growth: Growth, is_met: bool | None) -> str:
    readings = ", ".join(f"{size / _MIB:.1f}" for size in growth.rss_bytes)
    return (
        f"{title}: {growth.requests} requests, RSS {readings} MiB; second half {growth.late_bytes / 1024:+.0f} KiB"
        f" ({growth.bytes_per_request:+.1f} bytes a request); aim flat, {_word(is_met)}"
    )


def as_json(outcomes: Sequence[Outcome], micro_us: Mapping[str, float], about: Mapping[str, object]) -> dict[str, Any]:
    """Everything that was measured, for ``--json``.

    Args:
        outcomes: The cases.
        micro_us: Microseconds a call by name.
        about: Where and with what it was measured.
    """
    found: list[dict[str, Any]] = []
    for outcome in outcomes:
        entry: dict[str, Any] = {
            "name": outcome.name,
            "title": outcome.title,
            "item": outcome.item,
            "aim": outcome.aim,
            "is_met": outcome.is_met,
            "error": outcome.error,
        }
        result = outcome.result
        if isinstance(result, Comparison):
            entry |= {
                "ratio": result.ratio,
                "median_ratio": result.median_ratio,
                "gateway_us": best_us(result.gateway),
                "haproxy_us": best_us(result.haproxy),
                "gateway_per_s": best_per_s(result.gateway),
                "haproxy_per_s": best_per_s(result.haproxy),
                "direct_per_s": best_per_s(result.direct),
                "disturbed_samples": result.disturbed_rounds,
                "samples": asdict(result),
            }
        elif isinstance(result, Growth):
            entry |= {
                "requests": result.requests,
                "rss_bytes": list(result.rss_bytes),
                "late_bytes": result.late_bytes,
                "bytes_per_request": result.bytes_per_request,
            }
        found.append(entry)
    return {"about": dict(about), "cases": found, "micro_us": dict(micro_us)}
