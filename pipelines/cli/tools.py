"""tools: commands that make or tidy something beside the loop: `export`, `serve-config`, `check-code`, ..."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import Field, ValidationError

from pipelines.cli.options import (
    TOOLS,
    Root,
    RunName,
    TeamName,
    existing_run,
    reports_errors,
    split_team,
)
from serve_apps.config import SandboxConfig
from stores.settings import Settings

Embed = Annotated[
    str,
    typer.Option(
        help="package.module:function from texts to vectors: also searches by vectors. Default: full text only."
    ),
]


class Submission(Settings):
    """The JSON that `check-code` reads."""

    code: str
    tests: Any
    fn_name: str = ""
    checker: str = ""
    checker_code: str = ""
    limits: SandboxConfig = Field(default_factory=SandboxConfig)


def add_to(app: typer.Typer) -> None:
    """Adds the commands of this file to `app`."""
    app.command("serve-config", rich_help_panel=TOOLS)(print_serve_config)
    for command in (export, corpus, retriever):
        app.command(rich_help_panel=TOOLS)(command)
    app.command("check-code", rich_help_panel=TOOLS)(check_code)


@reports_errors
def check_code(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="JSON with code, tests and optionally fn_name, checker, checker_code, limits; - reads standard input.",
        ),
    ],
) -> None:
    """Run a program against its tests in the sandbox. Prints the verdict and each case as JSON, and which isolation is active."""
    from serve_apps.tools.code_tests import read_tests
    from serve_apps.tools.code_verifier import NOT_JUDGED, CodeVerifier
    from serve_apps.tools.sandbox import Sandbox

    submission = _read(file)
    tests: Any = submission.tests
    if submission.checker or submission.checker_code:
        tests = {"tests": tests, "checker_type": submission.checker, "checker_code": submission.checker_code}
    cases = read_tests(tests, place=f"{file}: tests", fn_name=submission.fn_name)
    sandbox = Sandbox(submission.limits)
    print(sandbox.describe(), file=sys.stderr)
    judged = CodeVerifier(sandbox=sandbox, max_cases=len(cases.cases)).judge(submission.code, cases)
    print(json.dumps(judged.to_dict(), indent=2))
    if judged.verdict in NOT_JUDGED:
        raise SystemExit(1)


@reports_errors
def corpus(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="DOCUMENTS.jsonl", help="A file with one document per line: id, contents (or title, text)."
        ),
    ],
    uri: Annotated[str, typer.Argument(metavar="CORPUS", help="The folder or LanceDB URI of the index.")],
    embed: Embed = "",
) -> None:
    """Build the index that agents search. An index that is there is replaced."""
    from stores.traces.corpus import build_corpus

    print(f"{build_corpus(uri, source, embed=_embedding(embed))} documents in {uri}")


@reports_errors
def retriever(
    uri: Annotated[str, typer.Argument(metavar="CORPUS", help="A corpus made by `troupe corpus`.")],
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port to listen on.")] = 8000,
    top_k: Annotated[
        int, typer.Option("--top-k", min=1, help="How many documents a request gets that asks for no number.")
    ] = 3,
    embed: Embed = "",
) -> None:
    """Serve a corpus with the API of Search-R1's retrieval server: POST /retrieve."""
    import uvicorn

    from serve_apps.http.http_connection import HttpConnection
    from serve_apps.tools.retriever_app import build_retriever
    from stores.traces.corpus import Corpus

    documents = Corpus(uri, embed=_embedding(embed))
    print(f"{len(documents)} documents at http://{host}:{port}/retrieve")
    api = build_retriever(documents, top_k=top_k)
    uvicorn.run(api, host=host, port=port, http=HttpConnection, ws="none", log_level="warning")


def _embedding(path: str) -> Any:
    from stores.by_name import open_by_name

    return open_by_name(path, place="--embed") if path else None


def _read(file: str) -> Submission:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        return Submission.model_validate_json(text)
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist (seen from {Path.cwd()})") from None
    except ValidationError as error:
        from pipelines.config.messages import explain

        raise ValueError(explain(error, Submission, file)) from None


@reports_errors
def print_serve_config(
    team: TeamName,
    root: Root = "runs",
) -> None:
    """Print the Ray Serve config of a registered team's policy apps, for `serve deploy` or a RayService."""
    from pipelines.report.inspect import serve_config

    name, alias = split_team(team)
    run = existing_run(name, root, is_read_only=True)
    print(yaml.safe_dump(serve_config(run, alias), sort_keys=False), end="")
    if any(s.gpus == 0 and s.threads == "auto" for s in map(run.config.serve_config, run.config.model_groups)):
        print(
            "troupe: serve.threads is auto: `threads` counts the cores of this machine; set it to those of the machines that serve",
            file=sys.stderr,
        )


@reports_errors
def export(
    model_group: Annotated[str, typer.Argument(help="The model group.")],
    version: Annotated[int, typer.Argument(help="The version of its model.")],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    config: RunName,
    is_merged: Annotated[
        bool, typer.Option("--merged", help="Merges an adapter with its base into one model.")
    ] = False,
    root: Root = "runs",
) -> None:
    """Write a model version as a Hugging Face folder (an adapter as a peft folder) after checking its hashes."""
    from pipelines.report.inspect import export_version

    run = existing_run(config, root, is_read_only=True)
    print(export_version(run, model_group, version, out, is_merged=is_merged))
