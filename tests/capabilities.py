"""Features that depend on the release of torch: tests that need one are skipped without it."""

import inspect
from typing import Final

import torch


# Since torch 2.11.
MODULES_CAN_REPEAT: Final = (
    "remove_duplicate" in inspect.signature(torch.nn.Module.modules).parameters
)


def _reads_first_elements() -> bool:
    norm = torch.nn.BatchNorm1d(1)
    try:
        norm.load_state_dict({"num_batches_tracked": torch.ones(2)}, strict=False)
    except RuntimeError:
        return False
    return True


# Before torch 2.10: the first element of any vector loads into a scalar.
FIRST_ELEMENTS_FIT: Final = _reads_first_elements()


def _refuses_empty_inputs() -> bool:
    try:
        torch.nn.LSTM(0, 1)
    except ValueError:
        return True
    return False


# In torch 2.13, and not in 2.8: a recurrent layer needs inputs.
EMPTY_INPUTS_ARE_REFUSED: Final = _refuses_empty_inputs()


def _averages_mixed_dtypes() -> bool:
    averaged = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(1, 1).bfloat16()).float()
    try:
        for _ in range(2):
            averaged.update_parameters(torch.nn.Linear(1, 1).bfloat16())
    except RuntimeError:
        return False
    return True


# Since torch 2.10: an average may have another dtype than the model.
MIXED_DTYPES: Final = _averages_mixed_dtypes()

# In torch 2.9, and not in 2.11: loading only weights fills subclasses of dicts that the user allows.
READERS_FILL_DICTS: Final = not hasattr(
    torch._weights_only_unpickler.Unpickler, "_check_set_item_target"
)
