"""Averages of sharded models: export to one file, and loading from DCP checkpoints."""

import os
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from modkit._namespace import publish_all
from modkit.averaging.checkpoints import cast as cast_average
from modkit.averaging.ema import EMA
from modkit.averaging.precision import compact
from modkit.averaging.sharding import check_not_partitioned, is_sharded, whole_tensor
from modkit.averaging.tensors import NamedTensors, canonical_name, canonical_names
from modkit.errors import shown
from modkit.files.atomic_write import atomic_write
from modkit.files.checkpoints import save_checkpoint
from modkit.files.safetensors_files import (
    Described,
    in_file_order,
    versions_as_metadata,
    write_safetensors,
)


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
    """Write the state dict of a model, with an average as its weights, to one file, atomically.

    All ranks must call this. Sharded tensors are gathered one at a time. Rank 0 writes each to a
    ``.safetensors`` file at once; for ``torch.save`` it collects them. All ranks return when the
    file is complete. Of a PEFT model it writes the base and the adapters, under the names that they
    have in that model; for an adapter file, call ``save_pretrained()`` inside ``EMA.applied()``.

    Args:
        ema: The averages, after one update or more.
        path: The file; the suffix ``.safetensors`` selects that format, any other that of
            ``torch.save``.
        index: Index of the average, if there are several.
        dtype: Dtype of floating-point tensors. Default: that of each tensor in the model.
        process_group: The ranks that the model is sharded over. Default: all.

    Raises:
        IndexError: If there is no average ``index``.
        TypeError: If an entry of the state dict is not plain data, which ``load_checkpoint`` reads.
        ValueError: If an entry, or a dtype, cannot be stored in a safetensors file, or an average
            is too large for the dtype.
        RuntimeError: If there has been no update, so there is no average to write, or a parameter
            has become empty; on the other ranks, if rank 0 could not write the file.
        OSError: On rank 0, if the file cannot be written.

    Warns:
        UserWarning: Once per ``EMA``, if more than 10 % of the average is the model of the first
            update, and more than in a plain mean.

    Example:
        >>> import torch
        >>> from modkit import EMA, nn
        >>> from modkit.distributed import export_average
        >>> path = tmp_path / "average.pt"
        >>> ema = EMA(nn.Linear(2, 1), decay=0.9)
        >>> ema.update()
        >>> export_average(ema, path)
        >>> nn.Linear(2, 1).load_state_dict(torch.load(path))
        <All keys matched successfully>
    """
    file = Path(path)
    contents = _Contents(ema, index, dtype, streamed=file.suffix == ".safetensors")
    ema._warn_of_first("export_average", index)
    gathered = contents.gathered()

    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    error: Exception | None = None
    if not is_distributed or torch.distributed.get_rank(process_group) == 0:
        try:
            contents.write(file, gathered)
        except Exception as raised:  # noqa: BLE001 - raised below, when all ranks know of it
            error = raised

    # Gathering is a collective: after an error on rank 0, the other ranks wait for it.
    for _ in gathered:
        pass

    messages = [None if error is None else f"{type(error).__name__}: {error}"]
    if is_distributed:
        try:
            torch.distributed.broadcast_object_list(messages, group=process_group, group_src=0)
        except RuntimeError as lost:
            # The connection is lost, which may be what the first error reports too.
            raise lost from error
    if error is not None:
        try:
            raise error
        finally:
            del error  # A reference cycle with this frame, which would keep the gathered tensors.
    if messages[0] is not None:
        raise RuntimeError(f"export_average: rank 0 could not write {file}: {messages[0]}")


class _Contents:
    """The state dict of a model, with an average as its weights.

    Args:
        ema: The averages.
        index: Index of the average.
        dtype: Dtype of floating-point tensors. Default: that of each tensor in the model.
        streamed: Whether the tensors are written one by one, in the order of a safetensors file.

    Raises:
        RuntimeError: If there is no average yet.
        ValueError: If ``streamed`` and an entry is not a tensor.
    """

    def __init__(
        self, ema: EMA[Any], index: int, dtype: torch.dtype | None, *, streamed: bool
    ) -> None:
        self._streamed = streamed
        averages = dict(ema.named_averages(index))
        if not averages:
            raise RuntimeError(
                f"export_average: {ema!r} has no average yet, and the file would hold the training "
                "weights. Call update() first, or load a state; with update_after_step the average "
                "starts later"
            )
        named = NamedTensors(ema.model)
        check_not_partitioned("export_average", named.modules)
        parameters = {name: member.current() for name, member in named.parameters.items()}
        ema._engine.check_filled("export_average", parameters)
        members = named.all()
        average_of = {id(member.current()): averages.get(name) for name, member in members.items()}

        state: OrderedDict[str, Any] = ema.model.state_dict(keep_vars=True)
        names = canonical_names(state)
        # Versions of the modules, which torch reads from an attribute of the state dict.
        self._metadata: OrderedDict[str, Any] | None = getattr(state, "_metadata", None)
        if self._metadata is not None and any(names[name] != name for name in names):
            # A wrapped module comes after its wrapper, and replaces it.
            self._metadata = OrderedDict(
                (canonical_name(f"{path}.").removesuffix("."), entry)
                for path, entry in self._metadata.items()
            )
        self._values: dict[str, Any] = {}
        self._described: dict[str, Described] = {}

        for key, value in state.items():
            name = names[key]
            average = average_of.get(id(value))
            self._values[name] = value if average is None else average
            if isinstance(value, Tensor):
                written = dtype if dtype is not None and value.is_floating_point() else value.dtype
                self._described[name] = Described(written, value.shape)
            elif streamed:
                raise ValueError(f"{name} is not a tensor; a safetensors file holds only tensors")
        if streamed:
            self._described = in_file_order(self._described)

    def gathered(self) -> Iterator[tuple[str, Tensor]]:
        """Gather the tensors into host memory one by one; all ranks must consume all of them."""
        for name in self._described:
            yield name, whole_tensor(self._values[name]).detach().cpu()

    def write(self, path: Path, gathered: Iterator[tuple[str, Tensor]]) -> None:
        """Write the file, consuming the gathered tensors, on the rank that raises its errors."""
        gathered = (
            (name, cast_average(name, tensor, str(tensor.dtype)[6:], self._described[name].dtype))
            for name, tensor in gathered
        )
        if self._streamed:
            with atomic_write(path) as unfinished:
                metadata = versions_as_metadata(self._metadata or {})
                write_safetensors(unfinished, self._described, gathered, metadata)
            return

        state: OrderedDict[str, Any] = OrderedDict(self._values)
        first: dict[int, Tensor] = {}
        for name, tensor in gathered:
            # Tied tensors stay tied.
            state[name] = first.setdefault(id(self._values[name]), compact(tensor))
        if self._metadata is not None:
            vars(state)["_metadata"] = self._metadata
        save_checkpoint(state, path)


def load_averages(
    ema: EMA[Any],
    checkpoint: "str | os.PathLike[str] | StorageReader",
    *,
    key: str = "ema",
    process_group: "ProcessGroup | None" = None,
) -> None:
    """Load averages from a checkpoint of ``torch.distributed.checkpoint``, saved at any world size.

    ``dcp.load`` fills existing tensors, and a new ``EMA`` has none. This function allocates the
    local shards first. All ranks must call it.

    Args:
        ema: The averages to load into, new or in the middle of a run.
        checkpoint: The folder that ``dcp.save`` wrote, or a reader for another storage.
        key: The name that ``ema.state_dict()`` was saved as; dots separate nested dicts.
        process_group: The ranks that load together. Default: all.

    Raises:
        FileNotFoundError: If there is no such checkpoint, or it was not finished.
        ValueError: If nothing was saved as ``key``, or it is not a state of averages.
        NameMismatchError: If the tensors do not fit the model. Nothing has been changed.
        CheckpointException: If an entry cannot be read, or is not plain data. It is torch's.
        RuntimeError: If the model holds an average, as inside ``EMA.applied()``, or is on the meta
            device and the averages have no device of their own.

    Example:
        >>> import warnings
        >>> import torch.distributed.checkpoint as dcp
        >>> from modkit import EMA, nn
        >>> from modkit.distributed import load_averages
        >>> ema = EMA(nn.Linear(2, 1), decay=0.9)
        >>> ema.update()
        >>> folder = tmp_path / "checkpoint"
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")  # torch warns that this is a single process
        ...     _ = dcp.save({"ema": ema.state_dict()}, checkpoint_id=folder)
        >>> resumed = EMA(nn.Linear(2, 1), decay=0.9)
        >>> load_averages(resumed, folder)
        >>> resumed.n_averaged
        1
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    is_folder = isinstance(checkpoint, (str, os.PathLike))
    reader = FileSystemReader(cast("str", checkpoint)) if is_folder else cast("Any", checkpoint)
    metadata = reader.read_metadata()
    # The path of keys in the nested dict, by the flat name in the checkpoint.
    saved: Mapping[str, tuple[Any, ...]] = metadata.planner_data or {}
    prefix = tuple(key.split("."))
    paths = {name: path for name, path in saved.items() if tuple(path[: len(prefix)]) == prefix}
    if not paths:
        keys = sorted({str(path[0]) for path in saved.values()})
        raise ValueError(shown(f"load_averages: nothing was saved as {key!r}, but {keys}"))

    with torch.inference_mode(False), torch.no_grad():
        room = _room_for(ema, {name: metadata.state_dict_metadata[name] for name in paths}, paths)
        with warnings.catch_warnings():
            # torch takes a single process for a mistake.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load(room, storage_reader=reader, planner=_planner(), process_group=process_group)
    state = _nested({tuple(paths[name][len(prefix) :]): value for name, value in room.items()})
    ema.load_state_dict(state)


def _room_for(
    ema: EMA[Any], saved: Mapping[str, Any], paths: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """Return a tensor for each tensor of a checkpoint: a shard where the model has one."""
    members = NamedTensors(ema.model).all()
    room: dict[str, Any] = {}
    for name, entry in saved.items():
        # The last part of a path is the name of a tensor, which has dots of its own.
        member = members.get(str(paths[name][-1]))

        if not hasattr(entry, "properties"):
            # The planner puts a value here that is not a tensor.
            room[name] = None
            continue

        tensor: Any = None if member is None else member.tensor
        dtype = entry.properties.dtype
        if is_sharded(tensor) and tensor.shape == entry.size:
            room[name] = torch.empty_like(tensor.detach(), dtype=dtype, device=ema.device)
        else:
            room[name] = torch.empty(entry.size, dtype=dtype, device="cpu")
    return room


def _planner() -> Any:
    """Return the planner of ``dcp.load`` for a flat dict, as ``_room_for`` makes it."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    class Planner(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: Any) -> None:
            # Unlike torch's planner, this executes no code from the file.
            self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    return Planner(flatten_state_dict=False, flatten_sharded_tensors=False)


def _nested(values: Mapping[tuple[Any, ...], Any]) -> Any:
    """Return the nested dicts, and lists where keys are integers, of values by their paths."""
    # The path of a value ends here.
    if () in values:
        return values[()]

    branches: dict[Any, dict[tuple[Any, ...], Any]] = {}
    for (key, *rest), value in values.items():
        branches.setdefault(key, {})[tuple(rest)] = value
    nested = {key: _nested(below) for key, below in branches.items()}
    if all(isinstance(key, int) for key in nested):
        return [nested[index] for index in sorted(nested)]
    return nested


publish_all(globals())
