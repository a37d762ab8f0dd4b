"""cli_tools: the commands around what workflows call: `graph`, `check-code`, `corpus`, `retriever`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field, ValidationError

from pipelines.cli.options import Debug, Root, errors, existing_run, find_run
from serve_apps.config import SandboxConfig, Settings

Embed = Annotated[
    str, typer.Option(help="package.module:function, texts -> vectors: search by vectors, too. Empty: full text alone.")
]


class Submission(Settings):
    """What `check-code` reads."""

    code: str
    tests: Any
    fn_name: str = ""
    checker: str = ""
    checker_code: str = ""
    limits: SandboxConfig = Field(default_factory=SandboxConfig)


def add_to(app: typer.Typer) -> None:
    """Makes the commands of this file commands of `app`."""
    app.command()(graph)
    app.command("check-code")(check_code)
    app.command()(corpus)
    app.command()(retriever)


def graph(
    config: Annotated[
        str, typer.Argument(metavar="RUN", help="Run config (RUN.yaml), or the name of a run below --root.")
    ],
    iteration: Annotated[int | None, typer.Option(min=1, help="Episodes of this iteration; default all.")] = None,
    root: Root = "runs",
    debug: Debug = False,
) -> None:
    """Print a workflow as a Mermaid flowchart: a declared one as it is written, a Python one as its stored episodes went."""
    with errors(debug):
        from pipelines.report.draw import draw_graph, draw_traces
        from serve_apps.workflows.declared import Declared

        run = find_run(config, root)
        workflow = run.workflow
        if isinstance(workflow, Declared):
            drawing = draw_graph(workflow.graph, title=run.run_id)
        else:
            stored = existing_run(config, root).traces
            traces = stored.find_traces(run_id=run.run_id, iteration=iteration, variant="", limit=500)
            if not traces:
                raise ValueError(f"run {run.run_id!r} has no stored episodes yet: a Python workflow is drawn from them")
            drawing = draw_traces(traces, title=run.run_id)
        print(drawing.mermaid(), end="")


def check_code(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="JSON with code, tests, and fn_name, checker, limits if wanted; - reads stdin."
        ),
    ],
    debug: Debug = False,
) -> None:
    """Judge one submission in the sandbox. Prints verdict, passed, total and each case as JSON; says which walls stand."""
    with errors(debug):
        from serve_apps.tools.code_tests import read_tests
        from serve_apps.tools.code_verifier import NOT_JUDGED, CodeVerifier
        from serve_apps.tools.sandbox import Sandbox

        given = _read(file)
        tests: Any = given.tests
        if given.checker or given.checker_code:
            tests = {"tests": tests, "checker_type": given.checker, "checker_code": given.checker_code}
        cases = read_tests(tests, place=f"{file}: tests", fn_name=given.fn_name)
        sandbox = Sandbox(given.limits)
        print(sandbox.describe(), file=sys.stderr)
        judged = CodeVerifier(sandbox=sandbox, max_cases=len(cases.cases)).judge(given.code, cases)
        print(json.dumps(judged.to_dict(), indent=2))
        if judged.verdict in NOT_JUDGED:
            raise typer.Exit(1)


def corpus(
    source: Annotated[
        Path, typer.Argument(metavar="DOCUMENTS.jsonl", help="One document per line: id, contents (or title, text).")
    ],
    uri: Annotated[str, typer.Argument(metavar="CORPUS", help="Where the index goes: a folder or LanceDB URI.")],
    embed: Embed = "",
    debug: Debug = False,
) -> None:
    """Build the index that agents search; what was there is replaced."""
    with errors(debug):
        from stores.corpus import build_corpus

        print(f"{build_corpus(uri, source, embed=_embedding(embed))} documents in {uri}")


def retriever(
    uri: Annotated[str, typer.Argument(metavar="CORPUS", help="A corpus made by `troupe corpus`.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="Documents where a request names no number.")] = 3,
    embed: Embed = "",
    debug: Debug = False,
) -> None:
    """Serve a corpus as Search-R1's retrieval server does: POST /retrieve."""
    with errors(debug):
        import uvicorn

        from serve_apps.tools.retriever_app import build_retriever
        from stores.corpus import Corpus

        found = Corpus(uri, embed=_embedding(embed))
        print(f"{len(found)} documents at http://{host}:{port}/retrieve")
        uvicorn.run(build_retriever(found, top_k=top_k), host=host, port=port, log_level="warning")


def _embedding(path: str) -> Any:
    from serve_apps.workflow import load_object

    return load_object(path, place="--embed") if path else None


def _read(file: str) -> Submission:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        return Submission.model_validate_json(text)
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist (seen from {Path.cwd()})") from None
    except ValidationError as error:
        from pipelines.config.run_config import explain

        raise ValueError(explain(error, Submission, file)) from None
