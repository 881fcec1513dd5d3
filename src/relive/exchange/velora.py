"""Velora: the files of its replay buffers."""

from __future__ import annotations

import os
from types import SimpleNamespace

from ..compat import velora
from ..errors import FileFormatError
from ..files.disk import usable
from ..look.readers import velora_replay
from .log import Log, json_object, log_of

STATE = "state.safetensors"
COLUMNS = ("states", "actions", "rewards", "next_states", "dones")


def from_velora(path: str | os.PathLike[str], prefix: str = "buffer_") -> Log:
    """The steps of a replay buffer that Velora or its drop-in here saved.

    Velora keeps one flag for ends of both kinds, which becomes ``terminated``. It keeps the rows of all envs in one
    ring. If observations show which rows follow each other, the rows are sorted by env. Observations after steps are
    kept.

    Args:
        path: the directory that was saved to, or the ``.safetensors`` file in it.
        prefix: the prefix of the names of the two files. If ``path`` is a file, its name gives the prefix.

    Raises:
        NoSaveError: a file is missing.
        FileFormatError: a file is damaged, is not Velora's, or contradicts the other one.
    """
    folder = usable(path)
    if folder.suffix == ".safetensors":
        if not folder.name.endswith(STATE):
            raise FileFormatError(
                f"'{folder}': expected a name that ends in {STATE}; give the directory and the prefix"
            )
        folder, prefix = folder.parent, folder.name.removesuffix(STATE)
    beside = folder / f"{prefix}metadata.json"
    metadata = velora.checked(json_object(beside, "the metadata of a Velora buffer"))
    state = velora.read_files(folder / f"{prefix}{STATE}", metadata, COLUMNS)
    if not metadata["size"]:
        raise FileFormatError(f"'{beside}': the buffer holds no step; collect some before you save it")
    steps = velora_replay(SimpleNamespace(**metadata, **state))
    steps.source = f"'{folder}', velora ReplayBuffer"
    if metadata["hidden_dim"]:
        steps.lacks += ("its hidden states were not read",)
    return log_of(steps)
