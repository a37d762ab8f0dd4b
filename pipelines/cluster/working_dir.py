"""working_dir: a folder -> the package that Ray unpacks for a job as its working directory."""

from __future__ import annotations

import subprocess
import zipfile
from hashlib import sha256
from io import BytesIO
from pathlib import Path

MAX_UPLOAD_BYTES = 256 * 1024**2


def package(folder: Path) -> tuple[str, bytes]:
    """Name (by content) and bytes of a zip of a folder: what git tracks or would, else everything.

    Raises ValueError where there is no such folder, or it is too large to send with every job.
    """
    if not folder.is_dir():
        raise ValueError(f"cluster.working_dir {str(folder)!r} is no folder")
    files = [folder / name for name in _known_to_git(folder)] or list(folder.rglob("*"))
    files = sorted(path for path in files if path.is_file())
    total = sum(path.stat().st_size for path in files)
    if total > MAX_UPLOAD_BYTES:
        raise ValueError(
            f"cluster.working_dir {str(folder)!r} holds {total / 1024**2:.0f} MiB, at most "
            f"{MAX_UPLOAD_BYTES // 1024**2} are sent: name a smaller folder, or give cluster.folder on a shared disk"
        )
    content = BytesIO()
    digest = sha256()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in files:
            data, name = path.read_bytes(), path.relative_to(folder).as_posix()
            entry = zipfile.ZipInfo(name)
            entry.external_attr = (path.stat().st_mode & 0o777) << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED)
            digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return f"_ray_pkg_{digest.hexdigest()[:32]}.zip", content.getvalue()


def _known_to_git(folder: Path) -> list[str]:
    """Files that git tracks or would; none where the folder is no checkout, or there is no git."""
    command = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "."]
    try:
        listed = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        return []
    return [name for name in listed.stdout.decode().split("\0") if name] if listed.returncode == 0 else []
