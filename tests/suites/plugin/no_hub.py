"""Pytest plugin for libraries that load from a hub: such tests fail at once, as without a network.

The client waits between its attempts, for half a minute in each test.
"""

import time
from types import SimpleNamespace

from huggingface_hub.utils import _http


_http.time = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
