"""Averages of sharded models: one full file or state, and loading from DCP checkpoints."""

import hashlib
import os
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch
from torch import Tensor
from typing_extensions import TypeVar

from modkit._messages import add_note
from modkit._namespace import publish_all
from modkit.averaging.checkpoints import cast as cast_average
from modkit.averaging.ema import EMA
from modkit.averaging.precision import compact
from modkit.averaging.sharding import check_not_partitioned, is_sharded, whole_tensor
from modkit.averaging.tensors import NamedTensors, canonical_names, canonical_paths
from modkit.errors import shown
from modkit.files.checkpoints import save_checkpoint
from modkit.files.safetensors_files import save_safetensors


if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.storage import StorageReader

__all__ = ["FullState", "export_average", "load_averages"]

ReportT = TypeVar("ReportT")


def exchanged(process_group: "ProcessGroup | None", report: Callable[[], ReportT]) -> list[ReportT]:
    """Call a function on all ranks, and return what it returns on each; all raise its errors."""
    if not _is_distributed():
        return [report()]

    error: BaseException | None = None
    try:
        content = pickle.dumps((None, report()))
    # Also Ctrl-C: the other ranks wait for this one.
    except BaseException as raised:  # noqa: BLE001 - raised below, when all ranks know of it
        error = raised
        content = pickle.dumps((_portable(raised), None))

    outcomes = _from_all_ranks(process_group, content)
    for rank, (failure, _) in enumerate(outcomes):
        if error is not None and repr(_portable(error)) == repr(failure):
            raise error
        if failure is not None:
            add_note(failure, f"It was raised on rank {rank}.")
            raise failure from error
    return [own for _, own in outcomes]


def _from_all_ranks(process_group: Any, content: bytes) -> list[Any]:
    """Return what all ranks have pickled. Equal contents, as those of FSDP, are not sent."""
    count = torch.distributed.get_world_size(process_group)
    own = hashlib.sha256(content).digest()
    digests: list[Any] = [None] * count
    torch.distributed.all_gather_object(digests, own, group=process_group)

    contents: list[Any] = [content] * count
    if set(digests) != {own}:
        # The first rank that has a content sends it.
        is_first = digests.index(own) == torch.distributed.get_rank(process_group)
        sent = content if is_first else b""
        torch.distributed.all_gather_object(contents, sent, group=process_group)
    # They were pickled by this program.
    return [pickle.loads(contents[digests.index(digest)]) for digest in digests]  # noqa: S301


def _portable(error: BaseException) -> Exception:
    """Return the error if it can be raised on another rank, or a RuntimeError with its text."""
    # Whatever its class raises, it cannot be sent.
    with suppress(Exception):
        copied = pickle.loads(pickle.dumps(error))  # noqa: S301 - pickled in this line
        if isinstance(error, Exception) and repr(copied) == repr(error):
            return error
    return RuntimeError(f"{type(error).__name__}: {error}")


_MSG_DISAGREE: Final = (
    "All ranks must have averaged the same steps: with on_nonfinite='skip', pipeline stages need "
    "EMA(process_group=). Ranks that do not hold parts of one model need a process_group= each"
)


class _Tensor(NamedTuple):
    """A tensor of a rank, without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    is_sharded: bool

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}{', sharded' if self.is_sharded else ''}"


def _gathered(
    call: str,
    process_group: "ProcessGroup | None",
    read: Callable[[], tuple[dict[Any, Any], dict[Any, Any]]],
) -> tuple[dict[Any, Any], dict[Any, Any]] | None:
    """Return on rank 0 what all ranks have, with full tensors in host memory; None elsewhere.

    ``read`` returns what a rank has by name: tensors, and values in which all ranks with the name
    must agree; then further entries, of which that of the first rank counts. A tensor that rank 0
    lacks, as those of other pipeline stages, comes from the first rank that has it.
    """  # noqa: DOC501 - of what differs, and of what fails on a rank
    own: dict[Any, Any] = {}

    def report() -> tuple[dict[Any, Any], dict[Any, Any]]:
        agreed, rest = read()
        own.update(agreed)
        return {name: _described(value) for name, value in agreed.items()}, rest

    values: dict[Any, Any] = {}
    rest: dict[Any, Any] = {}
    # The first rank that has an entry.
    owners: dict[Any, int] = {}
    for rank, (described, others) in enumerate(exchanged(process_group, report)):
        for name, value in described.items():
            owner = owners.setdefault(name, rank)
            first = values.setdefault(name, value)
            if value != first:
                key = name if isinstance(name, str) else ".".join(map(str, name))
                raise RuntimeError(
                    f"{call}: {key} is {first} on rank {owner} and {value} on rank {rank}. "
                    f"{_MSG_DISAGREE}"
                )
        for name, value in others.items():
            rest.setdefault(name, value)

    errors: list[Exception] = []
    place = torch.distributed.get_rank(process_group) if _is_distributed() else 0
    for name in [name for name, value in values.items() if isinstance(value, _Tensor)]:
        owner = owners[name]
        is_kept = place in (0, owner)
        received = [_full(own[name], errors, is_kept=is_kept) if name in own else None]
        if owner and place == owner:
            torch.distributed.send_object_list(received, group=process_group, group_dst=0)
        elif owner and place == 0:
            torch.distributed.recv_object_list(received, group=process_group, group_src=owner)
        values[name] = received[0]

    def check() -> None:
        if errors:
            raise errors[0]

    exchanged(process_group, check)
    return None if place else (values, rest)


def _described(value: Any) -> Any:
    """Return a value as ranks compare it."""
    is_tensor = isinstance(value, Tensor)
    return _Tensor(value.dtype, tuple(value.shape), is_sharded(value)) if is_tensor else value


def _full(tensor: Tensor, errors: list[Exception], *, is_kept: bool) -> Tensor | None:
    """Gather a tensor, and return it in host memory where it is kept; collect errors."""
    full: Tensor | None = None
    try:
        full = whole_tensor(tensor).detach()
        return full.cpu() if is_kept else None
    except Exception as error:
        # A lost connection ends the gathering. What fails on this rank alone does not: the other
        # ranks go on to the next tensor.
        if full is None and not isinstance(error, MemoryError):
            raise
        errors.append(error)
        return None


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


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

    All ranks must call this. Sharded tensors are gathered one at a time, into the host memory of
    rank 0, which writes the file. All ranks return when it is complete. Of a PEFT model it writes
    the base and the adapters, under the names that they have in that model; for an adapter file,
    call ``save_pretrained()`` inside ``EMA.applied()``.

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
        RuntimeError: If there has been no update, so there is no average to write, or ranks have
            averaged different steps.
        OSError: If rank 0 cannot write the file.
        Exception: What any other rank has raised; one that cannot be sent is a RuntimeError.

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
    is_plain = file.suffix == ".safetensors"
    contents = _gathered(
        "export_average", process_group, lambda: _contents_of(ema, index, dtype, is_plain)
    )

    def write() -> None:
        if contents is None:
            return
        values, rest = contents
        state: OrderedDict[str, Any] = OrderedDict()
        versions: dict[Any, Any] = {}
        for name, value in rest.items():
            kept_dtype = values.get(("dtype", name))
            if isinstance(name, tuple):
                versions[name[1]] = value
            elif kept_dtype is None:
                state[name] = value
            elif value != name:
                # Tied tensors stay tied: each has the name of the first.
                state[name] = state[value]
            else:
                full = values.pop(name)
                state[name] = compact(cast_average(name, full, str(full.dtype)[6:], kept_dtype))
        if is_plain:
            save_safetensors(state, file, versions)
        else:
            if versions:
                vars(state)["_metadata"] = versions
            save_checkpoint(state, file)

    exchanged(process_group, write)


def _contents_of(
    ema: EMA[Any], index: int, dtype: torch.dtype | None, is_plain: bool
) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Return the tensors of a file with the counters of their average, and its other entries."""
    # Names are strings. Tuples are the keys of what is not in the file under a name.
    averages = dict(ema.named_averages(index))
    if not averages:
        raise RuntimeError(
            f"export_average: {ema!r} has no average yet, and the file would hold the training "
            "weights. Call update() first, or load a state; with update_after_step the average "
            "starts later"
        )
    named = NamedTensors(ema.model)
    check_not_partitioned("export_average", named.modules)
    ema._warn_of_first("export_average", index)
    members = named.all()
    average_of = {id(member.current()): averages.get(name) for name, member in members.items()}

    state: Mapping[str, Any] = ema.model.state_dict(keep_vars=True)
    names = canonical_names(state)
    agreed: dict[Any, Any] = {("index",): index, ("n_averaged",): ema.n_averaged}
    metadata: Any = getattr(state, "_metadata", {})
    paths = canonical_paths(metadata)
    # A wrapped module comes after its wrapper, and replaces it.
    rest: dict[Any, Any] = {("_metadata", paths[at]): entry for at, entry in metadata.items()}
    first_names: dict[int, str] = {}
    for key, value in state.items():
        name = names[key]
        rest[name] = value
        if isinstance(value, Tensor):
            # The first name of a tied tensor.
            first = rest[name] = first_names.setdefault(id(value), name)
            average = average_of.get(id(value))
            agreed[first] = value if average is None else average
            is_cast = dtype is not None and value.is_floating_point()
            agreed["dtype", name] = dtype if is_cast else value.dtype
        elif is_plain:
            raise ValueError(f"{name} is not a tensor; a safetensors file holds only tensors")
    return agreed, rest


class FullState:
    """The full state of averages, for a checkpoint that one rank writes.

    The state of an ``EMA`` of a sharded model has the shards of one rank. Pass this object wherever
    a library saves what ``state_dict()`` returns on rank 0, such as
    ``accelerator.register_for_checkpointing``: it gathers the averages, and loads each rank's part
    of them. World size and sharding may differ when the state is loaded.

    All ranks must call both methods. Gathering takes one full tensor at a time on each rank, and
    the host memory of rank 0 for all averages; ``torch.distributed.checkpoint``, which takes the
    ``EMA`` itself, needs neither.

    Args:
        ema: The averages.
        process_group: The ranks that hold the model. Default: all.

    Example:
        >>> from modkit import EMA, nn
        >>> from modkit.distributed import FullState
        >>> ema = EMA(nn.Linear(2, 1), decay=0.9)
        >>> ema.update()
        >>> state = FullState(ema).state_dict()
        >>> resumed = EMA(nn.Linear(2, 1), decay=0.9)
        >>> FullState(resumed).load_state_dict(state)
        >>> resumed.n_averaged
        1
    """

    def __init__(self, ema: EMA[Any], process_group: "ProcessGroup | None" = None) -> None:
        self._ema = ema
        self._group = process_group

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Gather the state of the averages; all ranks must call this.

        Returns:
            On rank 0 the state that ``EMA.state_dict()`` returns, with full tensors in host memory;
            an empty dict on the other ranks.

        Raises:
            RuntimeError: If the ranks have averaged different steps, or have tensors of one name
                and different shapes.
        """
        contents = _gathered(
            "FullState", self._group, lambda: (dict(_flattened(self._ema.state_dict())), {})
        )
        return {} if contents is None else cast("dict[str, Any]", _nested(contents[0]))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state that :meth:`state_dict` returned; all ranks must call this with it.

        Args:
            state_dict: The state; each rank takes its part of it.

        Raises:
            ValueError: If the state is invalid, or empty on some ranks and not on others.
            NameMismatchError: If the state does not fit the model.
            RuntimeError: If the model holds an average, as inside ``EMA.applied()``.
        """
        _load(self._ema, self._group, lambda: dict(_flattened(state_dict)), dict)


def _load(
    ema: EMA[Any],
    process_group: "ProcessGroup | None",
    look: Callable[[], Mapping[tuple[Any, ...], Any]],
    read: Callable[[dict[tuple[Any, ...], Any]], Mapping[tuple[Any, ...], Any]],
) -> None:
    """Load a state on all ranks: ``look`` returns entries by path, and ``read`` their values."""
    entries: Mapping[tuple[Any, ...], Any] = {}

    def report() -> tuple[bool, list[str]]:
        nonlocal entries
        entries = look()
        return bool(entries), sorted(NamedTensors(ema.model).names())

    reports = exchanged(process_group, report)
    if len({has_state for has_state, _ in reports}) > 1:
        raise ValueError(
            "FullState.load_state_dict(): some ranks have no state. state_dict() returns it on "
            "rank 0 alone: load the file on all ranks"
        )
    # Only other ranks have these, as other stages of a pipeline do. They may be large.
    foreign = set[str]().union(*(names for _, names in reports)) - NamedTensors(ema.model).names()
    own = {path: entry for path, entry in entries.items() if path[-1] not in foreign}
    exchanged(process_group, lambda: ema.load_state_dict(_nested(read(own)) if own else {}))


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
            device.

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
    prefix = tuple(key.split("."))

    def look() -> dict[tuple[Any, ...], Any]:
        """Return the flat name and the metadata of each entry, by its path below the key."""
        metadata = reader.read_metadata()
        # The path of keys in the nested dict, by the flat name in the checkpoint.
        saved: Mapping[str, tuple[Any, ...]] = metadata.planner_data or {}
        entries = {
            tuple(path[len(prefix) :]): (name, metadata.state_dict_metadata[name])
            for name, path in saved.items()
            if tuple(path[: len(prefix)]) == prefix
        }
        if not entries:
            keys = sorted({str(path[0]) for path in saved.values()})
            raise ValueError(shown(f"load_averages: nothing was saved as {key!r}, but {keys}"))
        return entries

    def read(entries: dict[tuple[Any, ...], Any]) -> dict[tuple[Any, ...], Any]:
        with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings():
            # torch takes a single process for a mistake.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            room = _room_for(ema, entries)
            load(room, storage_reader=reader, planner=_planner(), process_group=process_group)
        return {path: room[name] for path, (name, _) in entries.items()}

    _load(ema, process_group, look, read)


def _room_for(ema: EMA[Any], entries: Mapping[tuple[Any, ...], Any]) -> dict[str, Any]:
    """Return a tensor for each tensor of a checkpoint: a shard where the model has one."""
    members = NamedTensors(ema.model).all()
    room: dict[str, Any] = {}
    for path, (name, entry) in entries.items():
        if not hasattr(entry, "properties"):
            # The planner puts a value here that is not a tensor.
            room[name] = None
            continue

        # The last part of a path is the name of a tensor, which has dots of its own.
        member = members.get(str(path[-1]))
        tensor: Any = None if member is None else member.tensor
        dtype = entry.properties.dtype
        if is_sharded(tensor) and tensor.shape == entry.size:
            room[name] = torch.empty_like(tensor.detach(), dtype=dtype, device=ema.device)
        else:
            room[name] = torch.empty(entry.size, dtype=dtype, device="cpu")
    return room


def _flattened(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the values of nested dicts and lists with their paths; :func:`_nested` undoes it."""
    if not isinstance(state, (Mapping, list)):
        yield path, state
        return
    for key, value in state.items() if isinstance(state, Mapping) else enumerate(state):
        yield from _flattened(value, (*path, key))


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
