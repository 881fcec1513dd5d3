"""The iterator that prefetches waits for ever after `sample` raised, and the error is lost."""

import sys
import threading
from importlib import metadata, util
from unittest.mock import MagicMock

try:
    package = metadata.distribution("lerobot")
except metadata.PackageNotFoundError:
    sys.exit(77)
for name in ("", ".datasets", ".datasets.lerobot_dataset", ".utils", ".utils.constants", ".utils.transition"):
    sys.modules[f"lerobot{name}"] = MagicMock()  # data sets, of which the buffer needs nothing here
spec = util.spec_from_file_location("buffer", package.locate_file("lerobot/rl/buffer.py"))
module = util.module_from_spec(spec)
spec.loader.exec_module(module)

came = []


def ask(prefetch: bool) -> None:
    buffer = module.ReplayBuffer(10, "cpu", ["x"], lambda x: x)  # empty, so `sample` raises a RuntimeError
    try:
        came.append(next(buffer.get_iterator(4, async_prefetch=prefetch)))
    except RuntimeError:
        came.append("a RuntimeError")


for prefetch in (False, True):
    thread = threading.Thread(target=ask, args=(prefetch,), daemon=True)
    thread.start()
    thread.join(timeout=5)
waits = thread.is_alive()
with_it = "nothing in 5 s" if waits else came[-1]
print(f"lerobot {package.version}: an empty buffer gives {came[0]} without the thread, and {with_it} with it")
sys.exit(0 if waits else 1)
