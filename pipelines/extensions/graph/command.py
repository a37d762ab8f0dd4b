"""command: `troupe graph`, a workflow as a flowchart."""

from __future__ import annotations

from typing import Annotated

import typer

from pipelines.cli.options import TOOLS, Root, RunArgument, existing_run, find_run, reports_errors


def add_to(app: typer.Typer) -> None:
    """Adds the command of this file to `app`."""
    app.command(rich_help_panel=TOOLS)(graph)


@reports_errors
def graph(
    config: RunArgument,
    iteration: Annotated[int | None, typer.Option(min=1, help="Draws the episodes of this iteration only.")] = None,
    root: Root = "runs",
) -> None:
    """Print a workflow as a Mermaid flowchart: a declared one from its file, a Python one from its stored episodes."""
    from pipelines.extensions.graph.draw import draw_graph, draw_traces
    from serve_apps.extensions.graphs.declared import Declared

    run = find_run(config, root, is_read_only=True)
    workflow = run.workflow
    if isinstance(workflow, Declared):
        drawing = draw_graph(workflow.graph, title=run.run_id)
    else:
        stored = existing_run(config, root, is_read_only=True).traces
        traces = stored.find_traces(run_id=run.run_id, iteration=iteration, variant="", limit=500)
        if not traces:
            raise ValueError(f"run {run.run_id!r} has no stored episodes yet: a Python workflow is drawn from them")
        drawing = draw_traces(traces, title=run.run_id)
    print(drawing.mermaid(), end="")
