"""page: the name of a template and its values -> a complete HTML page, light and dark, that needs no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "templates"


def render_template(name: str, **values: Any) -> str:
    """The page of template `name`. Every value is escaped; a name that is not among `values` is an error.

    `css`, `js` and `plotly_js` are added: the page's own style sheet and script, and Plotly.
    """
    # Imported here: the command line's help must not wait for them.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["duration"] = duration
    texts = {kind: (FOLDER / f"report.{kind}").read_text(encoding="utf-8") for kind in ("css", "js")}
    return environment.get_template(name).render(**texts, plotly_js=get_plotlyjs(), **values)


def duration(seconds: float) -> str:
    """Seconds in words, e.g. `90 s` or `6.5 min`."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
