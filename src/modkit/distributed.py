"""Averages of models that are split up among processes: one full file, and checkpoints of DCP."""

import os
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from modkit._namespace import publish_all
from modkit.averaging.ema import EMA
from modkit.averaging.named_tensors import NamedTensors, canonical_name, canonical_names
from modkit.averaging.precision import compact
from modkit.averaging.sharding import is_sharded, whole_tensor
from modkit.averaging.state import with_empty_parts
from modkit.files.atomic_write import atomic_write
from modkit.files.checkpoint_files import Described, in_file_order, write_safetensors
from modkit.files.torch_files import save_checkpoint


if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.storage import StorageReader

__all__ = ["export_average", "load_averages"]


@torch.no_grad()
def export_average(
    ema: EMA[Any],
    path: str | os.PathLike[str],
    *,
    index: int = 0,
    dtype: torch.dtype | None = None,
    process_group: "ProcessGroup | None" = None,
) -> None:
    """Write a model with an average as its weights into one file, as a single process would have it.

    Of a model that is split up, the tensors are put together one after the other, so that each process
    holds one whole tensor at a time; with ``.safetensors`` the first process writes it at once, with
    other names it collects them for ``torch.save``. The file is there whole or not at all.

    All processes have to call this. They return when the file is there.

    Args:
        ema: The averages. Before the first update the raw weights are written.
        path: The file; ``.safetensors`` in its name chooses that format.
        index: Which average, where there are several.
        dtype: Of what is of floating point; by default each tensor has that of the model.
        process_group: The processes that the model is split up among; by default all.

    Raises:
        IndexError: There is no such average.
        ValueError: The format has no such dtype.
        OSError: The first process could not write the file.
        RuntimeError: That has happened, in the others.

    Example:
        >>> import torch
        >>> from modkit import EMA, nn
        >>> from modkit.distributed import export_average
        >>> model = nn.Linear(2, 1)
        >>> ema = EMA(model, decay=0.9)
        >>> ema.update()
        >>> path = tmp_path / "average.pt"
        >>> export_average(ema, path)
        >>> model.load_state_dict(torch.load(path))
        <All keys matched successfully>
    """
    file = Path(path)
    contents = _Contents(ema, index, dtype, streamed=file.suffix == ".safetensors")
    gathered = contents.gathered()
    group = _Ranks(process_group)
    error: Exception | None = None
    if group.rank == 0:
        try:
            contents.write(file, gathered)
        except (OSError, RuntimeError, MemoryError) as raised:
            # It is raised below, when all processes know of it.
            error = raised
    # The others still wait for this process where it has shards that have not been written.
    for _ in gathered:
        pass
    message = None if error is None else f"{type(error).__name__}: {error}"
    try:
        message = group.message_of_first(message)
    except RuntimeError as lost:
        # The processes have lost one another, which may be what the first error says as well.
        raise lost from error
    if error is not None:
        raise error
    if message is not None:
        raise RuntimeError(f"export_average: the first process could not write {file}: {message}")


class _Ranks:
    """The processes that export together; one alone where there is no group."""

    def __init__(self, group: "ProcessGroup | None") -> None:
        self._group = group
        self._exists = _is_distributed()
        self.rank = torch.distributed.get_rank(group) if self._exists else 0

    def message_of_first(self, message: str | None) -> str | None:
        """Return what the first process has given, in all of them."""
        if not self._exists:
            return message
        messages = [message]
        torch.distributed.broadcast_object_list(messages, group=self._group, group_src=0)
        return messages[0]


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


class _Contents:
    """What goes into the file: the state of the model, with an average in place of the weights.

    Args:
        ema: The averages.
        index: Which of them.
        dtype: Of what is of floating point, or None for that of the model.
        streamed: Whether the file is one of safetensors.

    Raises:
        ValueError: The format has no place for what the state holds.
    """

    def __init__(
        self, ema: EMA[Any], index: int, dtype: torch.dtype | None, *, streamed: bool
    ) -> None:
        self._streamed = streamed
        averages = dict(ema.named_averages(index))
        members = NamedTensors(ema.model)
        every = {**members.parameters, **members.buffers}
        found = {id(member.current()): averages.get(name) for name, member in every.items()}
        state: OrderedDict[str, Any] = ema.model.state_dict(keep_vars=True)
        names = canonical_names(state)
        self._metadata = _metadata_of(state, wrapped=any(names[name] != name for name in names))
        self._values: dict[str, Any] = {}
        self._described: dict[str, Described] = {}
        for key, own in state.items():
            name, average = names[key], found.get(id(own))
            self._values[name] = own if average is None else average
            if isinstance(own, Tensor):
                cast = dtype if dtype is not None and own.is_floating_point() else own.dtype
                self._described[name] = Described(cast, own.shape)
            elif streamed:
                raise ValueError(f"{name} is no tensor, so it cannot be in a file of safetensors")
        if streamed:
            self._described = in_file_order(self._described)

    def gathered(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor, whole and in host memory; all processes have to take all of them."""
        for name, described in self._described.items():
            yield name, whole_tensor(self._values[name].detach().to(described.dtype)).cpu()

    def write(self, path: Path, gathered: Iterator[tuple[str, Tensor]]) -> None:
        """Write the file, and take the tensors for it."""
        if self._streamed:
            with atomic_write(path) as unfinished:
                write_safetensors(unfinished, self._described, gathered)
            return
        found: OrderedDict[str, Any] = OrderedDict(self._values)
        first: dict[int, Tensor] = {}
        for name, tensor in gathered:
            # What is tied stays tied.
            found[name] = first.setdefault(id(self._values[name]), compact(tensor))
        if self._metadata is not None:
            # As an attribute, which torch reads versions of modules from.
            vars(found)["_metadata"] = self._metadata
        save_checkpoint(found, path)


def _metadata_of(state: Mapping[str, Any], *, wrapped: bool) -> "OrderedDict[str, Any] | None":
    """Return the versions that the modules of a state have, by the names of the modules."""
    metadata: OrderedDict[str, Any] | None = getattr(state, "_metadata", None)
    if metadata is None or not wrapped:
        return metadata
    # What is wrapped comes after its wrapper, and takes its place.
    prefixes = {path: canonical_name(f"{path}.") if path else "" for path in metadata}
    return OrderedDict(
        (prefixes[path].removesuffix("."), facts) for path, facts in metadata.items()
    )


# Checkpoints of torch.distributed.checkpoint.


def load_averages(
    ema: EMA[Any],
    checkpoint: "str | os.PathLike[str] | StorageReader",
    *,
    key: str = "ema",
    process_group: "ProcessGroup | None" = None,
) -> None:
    """Load averages from a checkpoint of ``torch.distributed.checkpoint``, of any number of processes.

    ``dcp.load`` fills tensors that are there already, and an ``EMA`` that has not begun has none. So
    this looks up what the checkpoint holds, makes room for the shards that this process has of each
    tensor, has ``dcp.load`` fill it, and gives that to :meth:`~modkit.EMA.load_state_dict`.

    All processes have to call this.

    Args:
        ema: What to load into: new, or in the middle of a run.
        checkpoint: The folder that ``dcp.save`` has written, or a reader for another kind of storage.
        key: Under which name ``ema.state_dict()`` was saved; dots lead to a dict in a dict.
        process_group: The processes that load together; by default all.

    Raises:
        FileNotFoundError: There is no such checkpoint, or it was never finished.
        ValueError: Nothing was saved under that name, or it is no state of averages.
        NameMismatchError: Its tensors do not fit the model. Nothing has been changed.
        CheckpointException: That of torch: a part cannot be read, or is something other than plain data.
        RuntimeError: The averages are in the model (:meth:`~modkit.EMA.applied`).

    Example:
        >>> import warnings
        >>> import torch.distributed.checkpoint as dcp
        >>> from modkit import EMA, nn
        >>> from modkit.distributed import load_averages
        >>> ema = EMA(nn.Linear(2, 1), decay=0.9)
        >>> ema.update()
        >>> folder = tmp_path / "checkpoint"
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")  # that there is one process only
        ...     _ = dcp.save({"ema": ema.state_dict()}, checkpoint_id=folder)
        >>> resumed = EMA(nn.Linear(2, 1), decay=0.9)
        >>> load_averages(resumed, folder)
        >>> resumed.n_averaged
        1
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    place = isinstance(checkpoint, (str, os.PathLike))
    reader = FileSystemReader(cast("str", checkpoint)) if place else cast("Any", checkpoint)
    metadata = reader.read_metadata()
    paths = _paths_below(metadata, key)
    if not paths:
        there = sorted({str(path[0]) for path in (metadata.planner_data or {}).values()})
        raise ValueError(f"load_averages: nothing was saved as {key!r}, but {there}")
    with torch.no_grad():
        room = _room_for(ema, {name: metadata.state_dict_metadata[name] for name in paths}, paths)
        with warnings.catch_warnings():
            # One process alone is what it takes for a mistake.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load(room, storage_reader=reader, planner=_planner(), process_group=process_group)
    state = _nested({paths[name]: value for name, value in room.items()})
    ema.load_state_dict(with_empty_parts(state))


def _paths_below(metadata: Any, key: str) -> dict[str, tuple[Any, ...]]:
    """Return what was saved under a key: the names in the checkpoint, and the way to each value."""
    prefix = tuple(key.split("."))
    return {
        name: tuple(path[len(prefix) :])
        for name, path in (metadata.planner_data or {}).items()
        if tuple(path[: len(prefix)]) == prefix
    }


def _room_for(
    ema: EMA[Any], saved: Mapping[str, Any], paths: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """Return a tensor for each tensor of a checkpoint: a shard where the model has one."""
    members = NamedTensors(ema.model)
    every = {**members.parameters, **members.buffers}
    room: dict[str, Any] = {}
    for name, facts in saved.items():
        member = every.get(str(paths[name][-1]))
        if not hasattr(facts, "properties"):
            # What is no tensor is put here by the planner.
            room[name] = None
        elif member is not None and is_sharded(member.tensor) and member.tensor.shape == facts.size:
            own = member.tensor.detach()
            room[name] = torch.empty_like(own, dtype=facts.properties.dtype, device=ema.device)
        else:
            room[name] = torch.empty(facts.size, dtype=facts.properties.dtype)
    return room


def _planner() -> Any:
    """Return what reads a flat dict, and runs nothing of what it reads."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    class Planner(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: Any) -> None:
            self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    return Planner(flatten_state_dict=False, flatten_sharded_tensors=False)


def _nested(values: Mapping[tuple[Any, ...], Any]) -> dict[str, Any]:
    """Return dicts in dicts, and lists where the way to a value has a number."""
    tree: dict[Any, Any] = {}
    for path, value in values.items():
        place = tree
        for part in path[:-1]:
            place = place.setdefault(part, {})
        place[path[-1]] = value
    return cast("dict[str, Any]", _with_lists(tree))


def _with_lists(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    branches: dict[Any, Any] = tree
    found = {part: _with_lists(value) for part, value in branches.items()}
    if found and all(isinstance(part, int) for part in found):
        return [found[number] for number in sorted(found)]
    return found


publish_all(globals())
