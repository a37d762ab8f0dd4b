"""convert: a GGUF file -> a model folder in Hugging Face layout, which transformers, vLLM and Troupe read.

transformers reads the file, and takes every block of quantized weights back to numbers. What quantization lost stays lost.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.extensions.models.known import Dtype
from pipelines.runners.model_folder import check_model_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MAGIC = b"GGUF"
WITHOUT_GGUF = (
    "the package gguf is not installed, without which transformers reads no GGUF file: pip install 'troupe-rl[gguf]', or "
    "uv pip install gguf"
)


def convert_gguf(file: Path, folder: Path, *, dtype: Dtype = "float32") -> list[str]:
    """Writes the model of a GGUF file as a new folder, whole or not at all; returns notes on what the folder lacks.

    Raises ValueError where the file is no GGUF file that transformers reads, the folder is not new, or gguf is missing.
    """
    check_new(folder)
    check_gguf(file)
    with written_whole(folder) as scratch:
        write_model(file, scratch / "new", dtype=dtype)
        try:
            return check_model_folder(scratch / "new").notes
        except ValueError as fault:  # a template or an end token can be added by hand
            return [str(fault).replace(str(scratch / "new"), str(folder))]


def check_new(folder: Path) -> None:
    """Raises ValueError where there is something at `folder`."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not empty: give a new folder, or move it away")


def check_gguf(file: Path) -> None:
    """Raises ValueError where `file` cannot be a GGUF file, or where the package that reads them is missing."""
    if not file.is_file():
        raise ValueError(f"{file} does not exist (seen from {Path.cwd()})")
    with file.open("rb") as opened:
        if opened.read(len(MAGIC)) != MAGIC:
            raise ValueError(f"{file} is no GGUF file: it does not begin with {MAGIC.decode()}")
    check_can_convert()


def check_can_convert() -> None:
    """Raises ValueError where a package is missing that a conversion needs."""
    if find_spec("torch") is None or find_spec("transformers") is None:
        raise ValueError("torch or transformers is not installed: pip install 'troupe-rl[cpu,gguf]'")
    if find_spec("gguf") is None:
        raise ValueError(WITHOUT_GGUF)


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """Yields a scratch folder; what is in its `new` at the end becomes `folder`, in one step. After an error nothing is left."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-unfinished-") as name:
        scratch = Path(name)
        yield scratch
        os.rename(scratch / "new", folder)  # replaces an empty folder, fails at one that another process has filled


def write_model(file: Path, out: Path, *, dtype: Dtype, chat_template: str = "") -> None:
    """Writes the folder `out`. `chat_template` is taken where the file has none. Needs about 8 bytes of memory per parameter."""
    model, tokenizer = _load(file)
    import torch

    # transformers keeps its quantizer and refuses to save what came from one; these are plain numbers by now.
    model.hf_quantizer = None
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, name):
            delattr(model.config, name)
    model = model.to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    model.config._name_or_path = ""
    if chat_template and not tokenizer.chat_template:
        tokenizer.chat_template = chat_template
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    for weights in out.glob("*.safetensors"):  # safetensors writes them for the owner alone
        shutil.copymode(out / "config.json", weights)


def _load(file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in float32 and the tokenizer of a GGUF file; ValueError where transformers cannot read it."""
    # transformers imports deepspeed when it saves, which warns of every machine without a GPU.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("TQDM_DISABLE", "1")  # its reader of GGUF files does not ask its own switch for progress bars
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    place: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**place, trust_remote_code=False)
        # Without dequantize the blocks stay as they are, and cannot be saved.
        model = AutoModelForCausalLM.from_pretrained(
            **place,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            trust_remote_code=False,
        )
    except (OSError, MemoryError):
        raise
    except Exception as error:  # readers of files raise whatever comes up
        raise ValueError(
            f"{file}: transformers cannot read this GGUF file ({type(error).__name__}: {error}): take a model in Hugging Face layout "
            "(safetensors), or another architecture"
        ) from error
    return model, tokenizer
