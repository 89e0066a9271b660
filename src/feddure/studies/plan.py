"""The plan of a comparison and where its files lie; who only watches reads it without PyTorch."""

import itertools
from dataclasses import dataclass
from pathlib import Path

import yaml

from feddure.errors import RunError
from feddure.files import parse_yaml, read_regular

PLAN_FILE, REPORT_FILE = "comparison.yaml", "report.html"
TABLE_FILE, PAIRED_FILE, SITES_FILE = "comparison.csv", "paired.csv", "sites.csv"

REFERENCE = "fedavg-matched"
"""Labels only with everybody's number of steps: what learning from unlabelled images has to beat."""

_MOST_RUNS = 10_000
_LONGEST = 200  # bytes of a method's name: it becomes the name of a folder


@dataclass(frozen=True)
class Plan:
    """Which methods are compared, on which seeds, and which of them the others are measured against."""

    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    against: str

    def runs(self) -> list[tuple[str, int]]:
        """Every method on every seed."""
        return list(itertools.product(self.methods, self.seeds))

    def to_yaml(self) -> str:
        fields = {"methods": [*self.methods], "seeds": [*self.seeds], "against": self.against}
        return yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)


def read_plan(folder: Path) -> Plan | None:
    """The plan of a comparison's folder, or None where there is none yet."""
    path = folder / PLAN_FILE
    try:
        tree = parse_yaml(read_regular(path).decode())
        plan = Plan(tuple(map(str, tree["methods"])), tuple(map(int, tree["seeds"])), str(tree["against"]))
        possible = all(name.isprintable() and len(name.encode()) <= _LONGEST for name in plan.methods)
        if not possible or any(seed.bit_length() > 63 for seed in plan.seeds):
            raise ValueError
        if len(plan.methods) * len(plan.seeds) > _MOST_RUNS:
            raise ValueError
        return plan
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as problem:
        raise RunError(f"{path}: cannot be read ({problem.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError, ValueError, OverflowError):
        raise RunError(f"{path}: damaged, expected methods, seeds and against; choose another folder") from None


def run_folder(folder: Path, method: str, seed: int) -> Path:
    """Where a comparison keeps a run."""
    return folder / f"{method.replace('/', '_').replace(':', '_')}-seed{seed}"
