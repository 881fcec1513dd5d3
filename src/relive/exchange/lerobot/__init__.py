"""LeRobotDataset v3: Parquet files of frames, in and out."""

from .read import from_lerobot
from .write import to_lerobot

__all__ = ["from_lerobot", "to_lerobot"]
