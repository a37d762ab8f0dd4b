"""weights: stores immutable model versions, one folder each, which is complete as soon as its manifest exists.

    <uri>/<model group>/v<version>/   config.json  model.safetensors  tokenizer.json ...  manifest.json (last)
    <uri>/<base>/v0/                  the same, once for all model groups whose versions are adapters of it:
    <uri>/<model group>/v<version>/   adapter_config.json  adapter_model.safetensors  manifest.json (names the base)

If several processes commit a version, the first to finish wins, and the others get its version. On a local disk a whole
folder appears at once (rename). On object storage every try has a folder of its own, named by the manifest, which is
written last: files that no manifest names do not count, and a late try never mixes its files into another's. Nothing waits
for the disk (fsync makes a commit of 400 MB several times slower): any process may die, and `verify` finds what a power cut
has damaged.

Files of a remote version are copied into a cache on the machine that reads them, which keeps the last few per model group.
"""

from __future__ import annotations

import json
import time
from hashlib import sha256
from pathlib import Path

from stores.files import FileEntry, is_uri, list_files, local_path, move_file, read_file, remove_folder
from stores.types import ModelVersionRef
from stores.weights.manifest import (
    Manifest,
    Probe,
    read_manifest,
    refuse_not_finite,
    removed_at,
    tensors_of,
    verify_folder,
)
from stores.weights.weight_cache import fetch, remove_copy
from stores.weights.weight_files import MANIFEST, Folder


class WeightStore:
    """The model versions under one folder or pyarrow filesystem URI. It is cheap to create and to pickle."""

    def __init__(self, uri: str) -> None:
        """Args: uri: a folder, or a URI that `pyarrow.fs.FileSystem.from_uri` knows (file, s3, gs, abfss, hdfs)."""
        self.uri = str(uri).rstrip("/") if is_uri(str(uri)) else str(local_path(str(uri)))

    def uri_of(self, model_group: str, version: int) -> str:
        """Returns the folder of a version, whether it exists or not."""
        ends = "/?#" if is_uri(self.uri) else "/"  # in a URI the path ends at the others
        if not model_group or model_group.startswith(".") or any(end in model_group for end in ends):
            raise ValueError(f"model group {model_group!r} cannot name a folder: use letters, digits, '-' and '_'")
        return f"{self.uri}/{model_group}/v{version}"

    def commit(
        self,
        folder: str | Path,
        *,
        model_group: str,
        version: int,
        parent: int | None,
        run_id: str,
        iteration: int,
        probe: Probe,
        checkpoint: str = "",
        note: str = "",
        reference: int = 0,
        base: ModelVersionRef | None = None,
    ) -> ModelVersionRef:
        """Stores a copy of a Hugging Face folder as this version; a version that exists already is returned unchanged.

        With a `base` the folder is an adapter of it, in peft's layout.

        Hidden files stay out, as a clone's `.git` with a second copy of the weights, and so do weights in folders below: no engine loads them.

        Raises ValueError if the folder holds no readable safetensors weights, a number in them is not finite, or the version that
        exists is another run's.
        """
        existing = self.ref(model_group, version)
        if existing is not None:
            refuse_other_run(existing, run_id)
            return existing
        source = Path(folder)
        names = _part_names(source)
        tensors = tensors_of(source, names)
        for name in names:
            if name.endswith(".safetensors"):
                refuse_not_finite(source / name, of=f"version {version} of {model_group}")
        target = Folder.at(self.uri_of(model_group, version))
        with target.open_new() as store:
            manifest = Manifest(
                model_group=model_group,
                version=version,
                parent=parent,
                run_id=run_id,
                iteration=iteration,
                files={name: store.put(source / name, name) for name in names},
                size_bytes=sum((source / name).stat().st_size for name in names),
                tensors=tensors,
                is_tied=_is_tied(source / "config.json"),
                probe=probe,
                checkpoint=checkpoint,
                note=note,
                created_at=time.time(),
                folder=store.folder,
                reference=reference,
                base=base,
            )
            store.finish(manifest.to_text().encode())
        # Read again: another process may have finished first, and then its version counts.
        ref = self.ref(model_group, version)
        assert ref is not None, f"{target} was just committed"
        refuse_other_run(ref, run_id)
        return ref

    def ref(self, model_group: str, version: int) -> ModelVersionRef | None:
        """Returns a pointer to a committed version; None if there is none."""
        uri = self.uri_of(model_group, version)
        data = read_file(f"{uri}/{MANIFEST}")
        if data is None:
            return None
        return ModelVersionRef(
            model_group=model_group, version=version, uri=uri, manifest_sha256=sha256(data).hexdigest()
        )

    def manifest(self, ref: ModelVersionRef) -> Manifest:
        """Reads the manifest that `ref` names; ValueError if it is missing or has another checksum."""
        return read_manifest(ref)

    def versions(self, model_group: str) -> list[int]:
        """Returns the committed versions of a model group, ascending."""
        folder = Folder.at(self.uri_of(model_group, 0).rpartition("/")[0])
        numbers = sorted(int(n[1:]) for n in folder.subfolders() if n[:1] == "v" and n[1:].isdigit())
        return [n for n in numbers if self.ref(model_group, n) is not None]

    def remove(self, model_group: str, version: int) -> int:
        """Removes a version and returns its bytes; its manifest stays as the record of it, see `removed`.

        The manifest goes first: a removal that is killed leaves files that do not count, and `leftovers` finds them.
        """
        uri = self.uri_of(model_group, version)
        size_bytes = sum(file.size_bytes for file in list_files(uri))
        if read_file(f"{uri}/{MANIFEST}") is not None:
            move_file(f"{uri}/{MANIFEST}", removed_at(uri))
        remove_folder(uri)
        return size_bytes

    def removed(self, model_group: str, version: int) -> tuple[ModelVersionRef, Manifest] | None:
        """Returns the pointer to a version that was removed, and its manifest; None for any other version."""
        uri = self.uri_of(model_group, version)
        data = read_file(removed_at(uri))
        if data is None or self.ref(model_group, version) is not None:
            return None
        ref = ModelVersionRef(
            model_group=model_group, version=version, uri=uri, manifest_sha256=sha256(data).hexdigest()
        )
        return ref, Manifest.from_text(data.decode())

    def leftovers(self, model_group: str, *, older_than_s: float) -> dict[str, int]:
        """Returns bytes by folder, a path or URI: folders that no manifest names and that have not changed for so long."""
        parent = self.uri_of(model_group, 0).rpartition("/")[0]
        files: dict[str, list[FileEntry]] = {}
        for file in list_files(parent):
            version, _, rest = file.name.partition("/")
            is_try = is_uri(self.uri) and rest.startswith("try-")  # on a local disk it is a file of the model
            files.setdefault(f"{version}/{rest.partition('/')[0]}" if is_try else version, []).append(file)
        leftovers = {}
        for folder, entries in files.items():
            version, _, last = folder.partition("/")
            number = int(version[1:]) if version[:1] == "v" and version[1:].isdigit() else None
            ref = None if number is None else self.ref(model_group, number)
            is_named = ref is not None and (not last or read_manifest(ref).folder == last)
            if not is_named and max(e.changed_at for e in entries) < time.time() - older_than_s:
                leftovers[f"{parent}/{folder}"] = sum(e.size_bytes for e in entries)
        return leftovers

    def fetch(self, ref: ModelVersionRef, cache_dir: str | Path | None = None) -> Path:
        """Returns a local folder with the files of a version; nothing is copied if the store is on this machine."""
        return fetch(ref, cache_dir)

    def verify(self, ref: ModelVersionRef) -> None:
        """Reads all files of a version; ValueError names the first that is missing or differs from the manifest.

        Of a remote store the copy on this machine is read, and the store asked whether it still has all of it. A copy that differs is
        fetched again: only where the store's own file differs is the version damaged.
        """
        manifest = read_manifest(ref)
        if is_uri(ref.uri):
            folder = f"{ref.uri}/{manifest.folder}"
            sizes = {file.name: file.size_bytes for file in list_files(folder)}
            if missing := sorted(manifest.files.keys() - sizes):
                raise ValueError(f"{folder}/{missing[0]} is missing, the manifest lists it")
            if (size_bytes := sum(sizes[name] for name in manifest.files)) != manifest.size_bytes:
                raise ValueError(
                    f"{folder} holds {size_bytes} bytes, the manifest says {manifest.size_bytes}: it was changed or cut"
                )
            try:
                return verify_folder(self.fetch(ref), manifest)
            except ValueError:
                remove_copy(self.fetch(ref))
        verify_folder(self.fetch(ref), manifest)


def refuse_other_run(ref: ModelVersionRef, run_id: str) -> None:
    """Raises ValueError where another run made a version: it would be taken for one of `run_id`."""
    if (owner := read_manifest(ref).run_id) != run_id:
        raise ValueError(
            f"storage.weights: {ref.uri} is of run {owner!r}, and {run_id!r} needs a version of this name: give each run a store of its own, "
            "or name the model group otherwise"
        )


def _part_names(folder: Path) -> list[str]:
    """Returns the names of the files that are the model, sorted."""
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if name != MANIFEST and _is_part(name))


def _is_tied(config: Path) -> bool:
    return config.is_file() and bool(json.loads(config.read_text()).get("tie_word_embeddings", False))


def _is_part(name: str) -> bool:
    """Says whether a file of a model folder is part of the model."""
    is_hidden = any(part.startswith(".") for part in name.split("/"))
    return not is_hidden and not ("/" in name and name.endswith(".safetensors"))
