"""Data: sources, partitions, augmentation, batches."""

from feddure.data.dataset import Dataset
from feddure.data.sources import load, register

__all__ = ["Dataset", "load", "register"]
