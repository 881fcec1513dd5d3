"""The replay of groups raises a TypeError when two groups have the same score."""

import ast
import heapq
import sys
from importlib import metadata
from pathlib import Path

import torch

try:
    package = metadata.distribution("trl")
    folder = "trl/experimental/grpo_with_replay_buffer/grpo_with_replay_buffer_trainer.py"
    source = Path(package.locate_file(folder)).read_text()
except (metadata.PackageNotFoundError, FileNotFoundError):
    sys.exit(77)  # not there, or a release without this class
# the class alone, because its module imports all that trains a language model
(part,) = (x for x in ast.parse(source).body if isinstance(x, ast.ClassDef) and x.name == "ReplayBuffer")
names = {"heapq": heapq, "torch": torch}
exec(compile(ast.Module([part], []), folder, "exec"), names)

found = "nothing"
for first, second in ((0.5, 1.0), (1.0, 1.0)):  # two groups, with other scores and with the same
    try:
        names["ReplayBuffer"](8).add([first, second], [{"ids": torch.zeros(1)}, {"ids": torch.ones(1)}])
    except TypeError as error:
        found = f"scores {first} and {second}: TypeError: {error}"
print(f"trl {package.version}: {found}")
sys.exit(0 if found != "nothing" else 1)
