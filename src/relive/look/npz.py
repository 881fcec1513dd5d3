"""The arrays of an .npz file, which may have been damaged or made up. Nothing is ever unpickled."""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch

from ..errors import FileFormatError, ReliveError
from ..files.disk import open_file
from ..memory.estimate import require_free
from ..steps.arrays import Array

__all__ = ["read_npz"]


MEMBERS = 4096
"""The most arrays of a file."""


def read_npz(path: Path) -> dict[str, Array]:
    """The arrays of a file that ``numpy.savez`` wrote, by name.

    Raises:
        FileFormatError: the file is another one, is damaged, or holds Python objects.
        ParameterError: less memory is free than the arrays take.
        OSError: the file may not be read, or nothing is there.
    """
    with open_file(Path(os.path.realpath(path))) as stream:  # a link that a user names is meant
        try:
            with zipfile.ZipFile(stream) as archive:
                return _arrays_of(archive, path)
        except ReliveError:
            raise
        except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, TypeError, LookupError,
                ArithmeticError, RuntimeError, MemoryError) as error:  # fmt: skip
            reason = str(error).partition(".")[0]
            if isinstance(error, MemoryError):
                reason = "an array of it claims more numbers than memory holds"
            raise FileFormatError(
                f"'{path}': expected an .npz file of arrays, as numpy.savez writes it, got something else "
                f"({reason:.200}); write it again, without Python objects"
            ) from error


def _arrays_of(archive: zipfile.ZipFile, path: Path) -> dict[str, Array]:
    members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
    if len(members) > MEMBERS:
        raise ValueError(f"{len(members)} arrays")
    size = sum(member.file_size for member in members)
    require_free(size, torch.device("cpu"), f"reading '{path}'", "read it on a larger machine, or a part of it")
    found: dict[str, Array] = {}
    for member in members:
        with archive.open(member) as stream:
            found[member.filename.removesuffix(".npy")] = np.lib.format.read_array(stream, allow_pickle=False)
    return found
