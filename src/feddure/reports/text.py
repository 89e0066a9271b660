"""What a report says of its runs in words."""

from collections.abc import Sequence

from feddure.tracking import summary
from feddure.tracking.records import Record, Run
from feddure.tracking.summary import spoken

_SETTINGS = {
    "iid-iid": "Labelled and unlabelled images are spread evenly over the clients",
    "iid-dir": "Labelled images are spread evenly, unlabelled ones by a Dirichlet draw per class",
    "dir-dir": "Labelled and unlabelled images are spread by separate Dirichlet draws per class",
    "fedmatch": "Labelled images are spread evenly, unlabelled ones in FedMatch's class mixes",
    "sites": "Images stay with the sites that own them",
}


def title(runs: Sequence[Run]) -> str:
    """What was run on what."""
    methods = list(dict.fromkeys(spoken(run.experiment.method) for run in runs))
    datasets = list(dict.fromkeys(spoken(run.experiment.dataset) for run in runs))
    subject = listed(methods) if len(methods) <= 3 else f"{len(methods)} methods"
    text = f"{subject} on {listed(datasets) if len(datasets) <= 3 else f'{len(datasets)} data sets'}"
    return text if len(runs) == 1 else f"{text}, {len(runs)} runs"


def in_words(runs: Sequence[Run]) -> list[str]:
    """What the runs have in common, in sentences, and what sets them apart."""
    experiment = runs[0].experiment
    apart = summary.differences([run.experiment for run in runs])
    sentences = []
    if not {"partition.clients", "clients_per_round", "rounds"} & set(apart):
        clients = len(runs[0].partition.get("labelled", ())) or experiment.partition.clients
        drawn = f"{min(experiment.clients_per_round, clients)} of {clients} clients"
        sentences.append(f"{drawn} train in each of {experiment.rounds} rounds.")
    if not {"partition.setting", "partition.gamma"} & set(apart):
        dirichlet = experiment.partition.setting.endswith("-dir")
        gamma = f" (γ = {experiment.partition.gamma:g})" if dirichlet else ""
        sentences.append(f"{_SETTINGS[experiment.partition.setting]}{gamma}.")
    counts = {tuple(images_of(run.partition)) for run in runs}
    if len(counts) == 1 and all(sum(pair) for pair in counts):
        labelled, unlabelled = counts.pop()
        sentences.append(f"{labelled:,} images carry a label, {unlabelled:,} do not.")
    if "model" not in apart:
        sentences.append(f"Network: {spoken(experiment.model)}.")
    if len(runs) == 1:
        sentences.append(f"Seed: {experiment.seed}.")
    elif apart:
        sentences.append(f"The runs differ in {listed([summary.field_name(key) for key in apart], most=5)}.")
    return sentences


def images_of(partition: Record) -> tuple[int, int]:
    """Labelled and unlabelled images of all clients."""
    labelled, unlabelled = (sum(map(sum, partition.get(kind, ()))) for kind in ("labelled", "unlabelled"))
    return labelled, unlabelled + sum(partition.get("unknown") or ())


def first(names: Sequence[str], most: int) -> list[str]:
    """The first few names, and how many more there are."""
    return [*names[:most], f"{len(names) - most} more"] if len(names) > most else list(names)


def listed(names: Sequence[str], most: int = 8) -> str:
    """Names as a sentence lists them: a, b and c."""
    names = first(names, most)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
