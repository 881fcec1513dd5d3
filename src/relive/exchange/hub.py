"""The hub: data sets of Hugging Face by their address, downloaded by its own library."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from ..errors import NoSaveError, ParameterError
from ..names import needed

SCHEME = "hf:/"
"""How an address begins; a Path makes one slash of two."""

ADDRESS = re.compile(r"hf://?(?:datasets/)?(?P<name>[\w.-]+/[\w.-]+?)(?:@(?P<revision>[^\s@]+))?/?")


def is_address(path: str | os.PathLike[str]) -> bool:
    """True for the address of a data set on the hub, right or wrong."""
    return str(path).startswith(SCHEME)


def _hub() -> Any:
    with needed("hf:// needs huggingface_hub: pip install 'relive[hub]'"):
        return import_module("huggingface_hub")


def downloaded(address: str | os.PathLike[str], patterns: Sequence[str]) -> str:
    """The directory in the hub's cache with the files of a data set; those that are there are not asked for again.

    Args:
        address: ``hf://user/set``, also with ``@revision`` at its end.
        patterns: the files to get.

    Raises:
        ParameterError: it is no such address.
        ModuleNotFoundError: huggingface_hub is not installed.
        NoSaveError: the hub has no such data set, or does not show it, or cannot be reached.
    """
    text = str(address)
    parts = ADDRESS.fullmatch(text)
    if parts is None:
        raise ParameterError(f"{text!r:.200}: expected 'hf://user/set', or 'hf://user/set@revision'")
    hub = _hub()
    try:
        return hub.snapshot_download(
            repo_id=parts["name"], repo_type="dataset", revision=parts["revision"], allow_patterns=list(patterns)
        )
    except (OSError, ValueError) as error:  # all errors of the hub are one of them
        raise NoSaveError(
            f"'{text}': expected a data set on the hub, got {type(error).__name__}: {error!s:.300}; check the "
            "name and the network. For a private one, log in with: hf auth login"
        ) from error
