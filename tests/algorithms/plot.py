"""plot: learning curves of a comparison -> a picture: the mean over seeds, and a band from the least to the best seed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # after the backend that needs no display is chosen

COLORS = ("#3b82f6", "#f59e0b", "#10b981", "#ec4899", "#8b5cf6", "#06b6d4", "#ef4444", "#84cc16", "#a16207", "#0f766e")
REFERENCE_COLOR = "#111827"


def draw(found: Mapping[str, Mapping[str, Any]], *, reference: str, title: str, out: Path) -> None:
    """Writes a PNG of the `curves` of `table.figures`; each line is named at its end, best first in the legend."""
    figure, axes = plt.subplots(figsize=(9, 5.2), dpi=120)
    order = sorted(found, key=lambda row: -found[row]["after"])
    colors = dict(zip([row for row in order if row != reference], COLORS * len(order), strict=False))
    for row in order:
        curves = found[row]["curves"]
        x = [iteration for iteration, _ in curves[0]]
        values = [[curve[i][1] for curve in curves] for i in range(len(x))]
        mean = [sum(at) / len(at) for at in values]
        is_reference = row == reference
        color = REFERENCE_COLOR if is_reference else colors[row]
        style = {"color": color, "linewidth": 2.6 if is_reference else 1.7, "linestyle": "--" if is_reference else "-"}
        axes.plot(x, mean, label=f"{row}  {mean[-1]:.2f}", **style)
        axes.fill_between(
            x, [min(at) for at in values], [max(at) for at in values], color=color, alpha=0.1, linewidth=0
        )
    axes.set(xlabel="iteration", ylabel="held-out tasks solved", title=title, ylim=(0, 1))
    axes.set_xticks(sorted({iteration for row in order for curve in found[row]["curves"] for iteration, _ in curve}))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
    figure.savefig(out, bbox_inches="tight")
    plt.close(figure)
