"""infra/images.sh writes digests into the files that name images. The registry's client is a stand-in: no registry is asked."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from test_manifests import FOREIGN_IMAGES, INFRA

pytestmark = pytest.mark.fast

CRANE = """#!/bin/sh
case $2 in *gpu*) echo "error: not found" ;; *) printf 'sha256:%s\\n' "$(printf %s "$2" | sha256sum | cut -c1-64)" ;; esac
"""


@pytest.fixture
def infra(tmp_path: Path) -> Path:
    """A copy of what the script reads, and a client of registries for all images but the GPU's."""
    for name in ("containers", "compose", "kuberay"):
        shutil.copytree(INFRA / name, tmp_path / "infra" / name)
    shutil.copy(INFRA / "images.sh", tmp_path / "infra")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "crane").write_text(CRANE)
    (tmp_path / "bin" / "crane").chmod(0o755)
    return tmp_path / "infra"


def images(infra: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = f"{infra.parent / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        [infra / "images.sh", *words], env={"PATH": path}, capture_output=True, text=True, check=False
    )


def test_every_image_of_others_is_pinned_and_stays_so(infra: Path) -> None:
    foreign = {f"{name}:{tag}" for name, tag in FOREIGN_IMAGES.items()} | {
        line.split()[1]
        for path in (INFRA / "containers").iterdir()
        for line in path.read_text().splitlines()
        if line.startswith("FROM ")
    }
    done = images(infra, "pin")
    assert done.returncode == 0, done.stderr
    listed = {line[11:]: line[:11].strip() for line in images(infra, "list").stdout.splitlines()}
    pinned = {image for image, kind in listed.items() if kind == "by digest"}
    assert {image.partition("@")[0] for image in pinned} == {image.partition("@")[0] for image in foreign}
    assert all(re.fullmatch(r".+@sha256:[0-9a-f]{64}", image) for image in pinned)
    assert "by tag" not in listed.values()
    before = (infra / "compose" / "compose.yaml").read_text()
    assert images(infra, "pin").stderr == ""
    assert (infra / "compose" / "compose.yaml").read_text() == before


def test_images_of_ours_get_their_registry_and_digest_in_the_manifests_alone(infra: Path) -> None:
    compose = (infra / "compose" / "compose.yaml").read_text()
    done = images(infra, "own", "registry.example.com/ml")
    assert done.returncode == 1 and "gave no digest of registry.example.com/ml/troupe-gpu:" in done.stderr
    text = (infra / "kuberay" / "rayjob.yaml").read_text()
    assert len(re.findall(r"image: registry\.example\.com/ml/troupe-cpu:[\d.]+@sha256:[0-9a-f]{64}\n", text)) == 3
    assert "image: troupe-cpu" not in text
    assert (infra / "compose" / "compose.yaml").read_text() == compose


def test_without_a_client_it_says_what_is_missing(infra: Path) -> None:
    (infra.parent / "bin" / "crane").unlink()
    for program in ("bash", "dirname", "sed", "sort", "env"):
        (infra.parent / "bin" / program).symlink_to(shutil.which(program) or "")
    done = subprocess.run(
        [infra / "images.sh", "pin"], env={"PATH": str(infra.parent / "bin")}, capture_output=True, text=True
    )
    assert done.returncode == 1 and "none of crane, skopeo and docker buildx is installed" in done.stderr
