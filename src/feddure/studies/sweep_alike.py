"""Which experiments of a sweep must give the same numbers, whatever their configurations say."""

from feddure import methods
from feddure.config import Experiment

READ_BY = {
    "fixmatch": {"fedavg-fixmatch", "fedprox-fixmatch", "baseline+maml"},
    "uda": {"fedavg-uda", "fedprox-uda"},
    "feddure": {"feddure", "f-reg", "avg-f-reg", "c-reg", "avg-c-reg", "baseline+maml"},
    "fedmatch": {"fedmatch"},
}
"""Sections of the configuration, and the built-in methods that read them."""


def what_counts(experiment: Experiment) -> str:
    """Equal for two experiments where it is certain that their results are; of methods of one's own nothing is."""
    method = methods.METHODS.get(experiment.method)
    if method is None or not method.__module__.startswith(f"{methods.__name__}."):
        return experiment.fingerprint()
    unread = [section for section, readers in READ_BY.items() if method.name not in readers]
    if "dir" not in experiment.partition.setting:
        usual = type(experiment.partition).model_fields["gamma"].default
        partition = experiment.partition.model_copy(update={"gamma": usual})
        experiment = experiment.model_copy(update={"partition": partition})
    defaults = {section: Experiment.model_fields[section].default for section in unread}
    return experiment.model_copy(update=defaults).fingerprint()
