"""The folders of a model group's checkpoints: which keep their files once a version is committed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from train_loops.run_checkpoints import drop_older

pytestmark = pytest.mark.test


def test_the_last_two_versions_keep_their_checkpoints_however_often_one_was_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    names = ["a-v9-00000000", "a-v10-00000000", "a-v11-00000001", "a-v11-00000002", "a-v11-00000003", "a-b-v1-00000000"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "policy.json").write_text("{}")
    drop_older(str(tmp_path), "a")
    left = {path.parent.name for path in tmp_path.glob("*/policy.json")}
    assert left == set(names) - {"a-v9-00000000"}
    assert (tmp_path / "a-v9-00000000").is_dir(), "Ray Train may know it, and fails where it is gone"
    drop_older(str(tmp_path / "nothing"), "a")
