"""Data: sources, partitions, augmentation, batches."""

from feddure.data.dataset import Dataset
from feddure.data.sources import expect_present, load, read, register, resolve

__all__ = ["Dataset", "expect_present", "load", "read", "register", "resolve"]
