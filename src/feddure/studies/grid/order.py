"""Which cells of a grid train together, and which come next."""

from collections.abc import Callable, Collection, Mapping, Sequence

from feddure.simulation import program
from feddure.studies.grid.store import Cell, Store

TOGETHER = 9
"""Cells that share the lanes of a GPU when nobody says: with five clients each they fill the lanes twice."""


def program_of(cell: Cell) -> str:
    """What cells that can share lanes, compiled code and captured graphs have in common."""
    engine = cell.experiment.engine.model_dump_json()
    return f"{cell.experiment.dataset} {program.fields(cell.experiment)} {engine}"


def programs_of(groups: Sequence[Sequence[Cell]]) -> dict[str, str]:
    """The programs of all cells, by their hashes."""
    return {cell.hash: program_of(group[0]) for group in groups for cell in group}


def groups(cells: Sequence[Cell], together: int | None = None) -> list[list[Cell]]:
    """Cells that can share lanes, in the order of their first ones; at most `together` in each."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(program_of(cell), []).append(cell)
    size = together or TOGETHER
    return [members[start : start + size] for members in found.values() for start in range(0, len(members), size)]


def portions(cells: Sequence[Cell], together: int | None, on_gpu: Callable[[Cell], bool]) -> list[list[Cell]]:
    """Cells as several processes take them: groups where they share a GPU's lanes or are asked to, else one by one."""
    return [
        part
        for group in groups(cells, together)
        for part in ([group] if together or on_gpu(group[0]) else [[cell] for cell in group])
    ]


def busy(programs: Mapping[str, str], store: Store) -> set[str]:
    """Those of these programs that processes of this machine are training now, whichever command has begun them."""
    return {programs[cell] for cell in store.under_way() if cell in programs}


def choose(waiting: Sequence[Sequence[Cell]], own: str | None, others: Collection[str]) -> int:
    """Which group a process takes next, of groups in the order that they should come.

    One of the program that it trained last, which is compiled; else one that no other process trains, as two that
    compile the same at the same time leave the GPU idle; else the first.
    """
    programs = [program_of(group[0]) for group in waiting]
    return min(range(len(programs)), key=lambda n: (programs[n] != own, programs[n] in others, n))
