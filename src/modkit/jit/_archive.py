"""What is in an archive, and whether it is whole, before anything of it is loaded."""

import hashlib
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import IO, Any

from modkit.errors import FileError
from modkit.files.zip_check import Archive, Source, opened
from modkit.jit import _archive_kinds as kinds
from modkit.jit._archive_code import ClassInfo, classes_in, runs_at_load
from modkit.jit._archive_formats import (
    is_harmless,
    tensors_of_export,
    tensors_of_pickle,
    tensors_of_safetensors,
    tensors_of_zip,
)
from modkit.jit._archive_pickle import Call, Name, read_pickle
from modkit.jit._archive_seal import EXTRA, SEAL, check_seal
from modkit.jit._archive_tensors import Kind, Reader, TensorInfo


@dataclass(frozen=True, repr=False)
class ArchiveInfo:
    """What is in a file, read without running anything that is in it.

    Args:
        kind: What the file is: ``"TorchScript archive"``, ``"torch.save file"``, ``"torch.export
            archive"``, ``"safetensors file"`` and so on.
        nbytes: Size of the file.
        sha256: Digest of the file, as ``sha256sum`` prints it.
        content_sha256: Digest of what is in a zip file, which is the same whatever name it was saved
            under and whichever lines of source it came from; empty for other files.
        format_version: Version of the container of torch, or None.
        bytecode_version: Version of the code for the mobile interpreter, or None if there is none.
        root: The class of the object in the file, or its type.
        classes: The classes of TorchScript in it.
        tensors: The tensors in it, in the order of the file.
        extra_files: The further files in it by name, with their sizes.
        runs_at_load: What runs while the file is loaded, in whole and not only its weights: methods
            of TorchScript and of C++ classes, or names that a pickle imports and calls. Nothing here
            does not mean that the file is safe: the code runs when the model is called.
    """

    kind: str
    nbytes: int
    sha256: str
    content_sha256: str = ""
    format_version: int | None = None
    bytecode_version: int | None = None
    root: str = ""
    classes: tuple[ClassInfo, ...] = ()
    tensors: tuple[TensorInfo, ...] = ()
    extra_files: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    runs_at_load: tuple[str, ...] = ()

    def __repr__(self) -> str:
        facts = [f"kind={self.kind!r}", f"nbytes={self.nbytes}"]
        shown = [(name, getattr(self, name)) for name in ("root", "format_version")]
        shown.append(("bytecode_version", self.bytecode_version))
        facts += [f"{name}={value!r}" for name, value in shown if value not in {"", None}]
        elements = sum(each.nbytes for each in self.tensors)
        if self.classes:
            facts.append(f"classes=<{len(self.classes)}>")
        facts.append(f"tensors=<{len(self.tensors)} of {elements} bytes>")
        facts.append(f"extra_files={dict(self.extra_files)}")
        facts.append(f"runs_at_load={list(self.runs_at_load)}")
        facts.append(f"sha256='{self.sha256[:12]}...'")
        return f"{type(self).__name__}({', '.join(facts)})"


def inspect(f: Source) -> ArchiveInfo:
    """Tell what is in a file of a model, without running anything that is in it.

    For files of unknown origin, and to see what a file holds before it takes up memory: no code is
    compiled, no pickle is executed, no tensor is read. Beside TorchScript archives it knows files of
    ``torch.save``, ``torch.export`` and safetensors, and tells what others are.

    Args:
        f: A path, the content of a file, or a file that is open for reading.

    Returns:
        What is in it.

    Raises:
        ValueError: There is no such file.
        FileError: The file is damaged, so that its contents cannot be listed, or made such that
            torch may read something else in it.

    Example:
        >>> import io
        >>> import torch
        >>> buffer = io.BytesIO()
        >>> torch.save({"weight": torch.ones(2, 3)}, buffer)
        >>> info = inspect(buffer)
        >>> info.kind
        'torch.save file'
        >>> [(each.name, each.shape, each.dtype) for each in info.tensors]
        [('weight', (2, 3), 'float32')]

    Not in torch.
    """
    with opened(f) as (file, what):
        kind = kinds.kind_of(file)
        nbytes = file.seek(0, io.SEEK_END)
        facts: dict[str, Any] = {"kind": kind, "nbytes": nbytes, "sha256": _digest(file)}
        names: tuple[Name, ...] = ()
        if kind == kinds.TORCHSCRIPT:
            archive = Archive(file, what)
            archive.check_unambiguous()
            return ArchiveInfo(**facts, **_script_facts(archive))
        if kind == kinds.SAFETENSORS:
            facts["tensors"] = tuple(tensors_of_safetensors(file, what))
        elif kind in {kinds.LEGACY, kinds.PICKLE}:
            tensors, names = tensors_of_pickle(file, what, kind == kinds.LEGACY)
            facts["tensors"] = tuple(tensors)
        elif kind in {kinds.STATE_DICT, kinds.EXPORT, kinds.PACKAGE, kinds.INDUCTOR, kinds.ZIP}:
            archive = Archive(file, what)
            facts |= _container_facts(archive)
            if kind == kinds.EXPORT:
                facts["tensors"] = tuple(tensors_of_export(archive))
            elif kind == kinds.STATE_DICT:
                tensors, names = tensors_of_zip(archive, "data.pkl", "data/")
                facts["tensors"] = tuple(tensors)
        facts["runs_at_load"] = tuple(str(name) for name in names if not is_harmless(name))
        return ArchiveInfo(**facts)


def check_archive(
    f: Source, sha256: str | None = None, extra_files: Iterable[str] = ()
) -> dict[str, int]:
    """Make sure that a file is a whole TorchScript archive, before it is loaded.

    Torch loads flipped bits in the weights without a complaint. Here the content of every member is
    compared with its checksum, every tensor with the size of its storage, and, where modkit has saved
    the archive, the members with those that were saved.

    It finds damage, not malice: who changes a file on purpose changes the checksums too. Against that
    there is ``sha256``, the digest of the file that you trust.

    Args:
        f: A path, the content of a file, or a file that is open for reading.
        sha256: The digest that the file should have, as ``sha256sum`` prints it.
        extra_files: Names of extra files that should be in it.

    Returns:
        The extra files by name, with their sizes.

    Raises:
        ValueError: There is no such file, or it has another digest than ``sha256``.
        FileError: It is a file of another kind, which the text names with what reads it, or it is
            damaged.
        KeyError: It has not all of ``extra_files``.

    Example:
        >>> check_archive(b"not a model")
        Traceback (most recent call last):
            ...
        modkit.errors.FileError: the data is a text file, not a TorchScript archive

    Not in torch: https://github.com/pytorch/pytorch/issues/126952
    """
    with opened(f) as (file, what):
        if sha256 is not None:
            _check_digest(file, what, sha256)
        kind = kinds.kind_of(file)
        if kind != kinds.TORCHSCRIPT:
            raise kinds.wrong_kind(kind, what)
        archive = Archive(file, what)
        archive.check_unambiguous()
        _check_members(archive)
        check_seal(archive, archive.verify())
        _script_tensors(archive, {})
        found = _extra_files(archive)
        missing = [name for name in extra_files if name not in found]
        if missing:
            there = f"it has {', '.join(map(repr, found))}" if found else "it has none"
            raise KeyError(f"{what} has no extra file {', '.join(map(repr, missing))}; {there}")
        return found


def _check_members(archive: Archive) -> None:
    needed = ["data.pkl", "constants.pkl"]
    missing = [name for name in needed if name not in archive.members]
    if not {"version", ".data/version"} & archive.members.keys():
        missing.append("version")
    if missing:
        raise FileError(f"{archive.what} is damaged: {', '.join(missing)} is not there")


def _digest(file: IO[bytes]) -> str:
    file.seek(0)
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def _check_digest(file: IO[bytes], what: str, expected: str) -> None:
    wanted = expected.strip().lower().removeprefix("sha256:")
    if len(wanted) != 64 or set(wanted) - set("0123456789abcdef"):
        raise ValueError(f"sha256 has to be 64 hexadecimal digits, not {expected!r}")
    found = _digest(file)
    if found != wanted:
        raise ValueError(f"{what} has the SHA-256 {found}, not {wanted}: it is another file")


def _extra_files(archive: Archive) -> dict[str, int]:
    names = (name for name in archive.members if name.startswith(EXTRA))
    return {name.removeprefix(EXTRA): archive.sizes[name] for name in names}


def _content_digest(archive: Archive) -> str:
    """Digest the members by name, without those that differ between two saves of one model."""
    digest = hashlib.sha256()
    for name in sorted(archive.members):
        if name.endswith(".debug_pkl") or name in {".data/serialization_id", SEAL}:
            continue
        digest.update(f"{len(name.encode())} {archive.sizes[name]}\n{name}".encode())
        for chunk in archive.chunks(name):
            digest.update(chunk)
    return digest.hexdigest()


def _container_facts(archive: Archive) -> dict[str, Any]:
    member = next((name for name in (".data/version", "version") if name in archive.members), None)
    text = archive.text(member).strip() if member else ""
    return {
        "content_sha256": _content_digest(archive),
        "format_version": int(text) if text.isascii() and text.isdigit() else None,
        "extra_files": MappingProxyType(_extra_files(archive)),
    }


def _pickle(archive: Archive, member: str) -> tuple[Any, tuple[Name, ...]]:
    return read_pickle(io.BytesIO(archive.read(member)), f"{archive.what}: {member}")


def _script_facts(archive: Archive) -> dict[str, Any]:
    code = {name: archive.text(name) for name in archive.members if name.lower().endswith(".py")}
    classes = [each for name, text in code.items() for each in classes_in(name, text)]
    at_load = [each for name, text in code.items() for each in runs_at_load(name, text)]
    facts = _container_facts(archive)
    root, tensors, names = _script_tensors(archive, {each.name: each for each in classes})
    # Objects of C++ classes are made by the library that has registered the class.
    at_load += [str(name) for name in names if name.module.startswith("__torch__.torch.classes")]
    if "bytecode.pkl" in archive.members:
        bytecode, _ = _pickle(archive, "bytecode.pkl")
        first = bytecode[0] if isinstance(bytecode, tuple) and bytecode else None
        facts["bytecode_version"] = first if type(first) is int else None
    return {
        **facts,
        "root": str(root.function) if isinstance(root, Call) else type(root).__name__,
        "classes": tuple(classes),
        "tensors": tuple(tensors),
        "runs_at_load": tuple(dict.fromkeys(at_load)),
    }


def _script_tensors(
    archive: Archive, classes: Mapping[str, ClassInfo]
) -> tuple[Any, list[TensorInfo], tuple[Name, ...]]:
    def kind_of(owner: Name, key: str) -> Kind:
        known = classes.get(str(owner))
        if known is not None and key in known.parameters:
            return "parameter"
        return "buffer" if known is not None and key in known.buffers else "attribute"

    root, names = _pickle(archive, "data.pkl")
    reader = Reader(archive.sizes, "data/", f"{archive.what}: data.pkl")
    tensors = list(reader.walk(root, kind_of))
    if "constants.pkl" in archive.members:
        constants, more = _pickle(archive, "constants.pkl")
        reader = Reader(archive.sizes, "constants/", f"{archive.what}: constants.pkl")
        tensors += [
            replace(each, name=f"CONSTANTS.c{each.name}", kind="constant")
            for each in reader.walk(constants, kind_of)
        ]
        names += more
    return root, tensors, names
