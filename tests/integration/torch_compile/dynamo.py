"""The marks of the tests of ``torch.compile``."""

import pytest


# The tracer looks at ``.grad`` of every tensor that enters a frame, results of earlier ones too.
compiled_tests = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
