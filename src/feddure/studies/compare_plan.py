"""The plan of a comparison: which methods, which seeds, and where its files lie."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from feddure import methods as known_methods
from feddure.errors import ConfigError, RunError
from feddure.tracking import records

PLAN_FILE, TABLE_FILE, PAIRED_FILE, REPORT_FILE = "comparison.yaml", "comparison.csv", "paired.csv", "report.html"
REFERENCE = "fedavg-matched"
"""Labels only with everybody's number of steps: what learning from unlabelled images has to beat."""


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
        fields = {"methods": list(self.methods), "seeds": list(self.seeds), "against": self.against}
        return yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)


def make_plan(
    methods: Sequence[str], seeds: Sequence[int], against: str | None = None, present: Plan | None = None
) -> Plan:
    """A plan, checked; what a `present` one compares already stays in it."""
    for option, given in (("--methods", methods), ("--seeds", seeds)):
        twice = [str(value) for place, value in enumerate(given) if value in given[:place]]
        if twice:
            raise ConfigError(f"{option}: {twice[0]} was given twice; name each once")
    if present is not None:
        methods = [*present.methods, *(name for name in methods if name not in present.methods)]
        seeds = [*present.seeds, *(seed for seed in seeds if seed not in present.seeds)]
        against = against or present.against
    if not methods:
        names = ", ".join(known_methods.METHODS)
        raise ConfigError(f"no method was given: name those to compare, --methods a,b,c; there are: {names}")
    if against is None:
        against = REFERENCE if REFERENCE in methods else methods[0]
    elif against not in methods:
        raise ConfigError(f"--against {against}: expected one of the methods compared: {', '.join(methods)}")
    return Plan(tuple(methods), tuple(seeds), against)


def read_plan(folder: Path) -> Plan | None:
    """The plan of a comparison's folder, or None where there is none yet."""
    path = folder / PLAN_FILE
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        return Plan(tuple(map(str, tree["methods"])), tuple(map(int, tree["seeds"])), str(tree["against"]))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as problem:
        raise RunError(f"{path}: cannot be read ({problem.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError, ValueError):
        raise RunError(
            f"{path}: damaged, expected methods, seeds and against; restore it or choose another --out"
        ) from None


def config_to_resume(folder: Path | None) -> Path:
    """The configuration that all runs of a comparison share, where nothing but its folder was given."""
    if folder is None:
        raise RunError("--resume was given without --out: name the folder of the comparison to go on with")
    plan = read_plan(folder)
    found = plan and next(
        (path for run in plan.runs() if (path := run_folder(folder, *run) / records.CONFIG).exists()), None
    )
    if not found:
        raise RunError(f"{folder}: no comparison is there to resume; give its --preset or --config to start one")
    return found


def run_folder(folder: Path, method: str, seed: int) -> Path:
    """Where a comparison keeps a run."""
    return folder / f"{method.replace('/', '_').replace(':', '_')}-seed{seed}"
