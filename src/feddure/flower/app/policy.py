"""What a site lets a server ask of it; a node's configuration decides.

`helpers=false`: the site takes no part in FedMatch, whose server hands a site's parameters to other sites as helpers.
`modules=true`: methods and networks may be classes of modules that are installed at the site, `package.module:Class`.
Without it a server could make the site import, and so run, any module that it finds.
"""

from collections.abc import Mapping
from typing import Any

import psutil

from feddure import methods, plugins
from feddure.config import Experiment
from feddure.errors import ConfigError
from feddure.files import parse_yaml
from feddure.flower.app.sanitize import disclosed
from feddure.methods.base import Method
from feddure.simulation.server import Assignment

MOST_IMAGES = 10**8
"""Images that a server may ask a site to go through in one round, repeated ones included."""
MOST_IN_STEP = 2**16
"""Images that a server may ask a site to take in one step."""
_EPOCHS = 4
"""Times an epoch over the images that are here: since the server was told of them some may have been taken away."""

MOST_HELPERS = 64
"""Models of other sites that a server may send along, each of which takes memory here."""


def check_policy(node: Mapping[str, Any], experiment: str) -> None:
    """Refuse an experiment, as YAML, that the node's configuration does not allow; nothing is imported for it."""
    tree = parse_yaml(experiment) or {}
    wanted = {name: str(tree.get(name) or "") for name in ("method", "model")}
    for name, value in wanted.items():
        if ":" in value and not _allows(node, "modules", default=False):
            raise disclosed(
                ConfigError(
                    f"{name} '{value}': own modules are not allowed at this site; allow them with modules=true"
                ),
                "own modules are not allowed at this site",
            )
    plugins.allow(*wanted.values())
    if relays_uploads(wanted["method"]) and not _allows(node, "helpers", default=True):
        raise disclosed(
            ConfigError(f"method '{wanted['method']}' sends a site's parameters to other sites, and helpers=false"),
            f"this site declines method '{wanted['method']}', which sends its parameters to other sites as helpers",
        )


def check_work(
    experiment: Experiment, method: Method, assignment: Assignment, labelled: int, unlabelled: int, image_bytes: int
) -> None:
    """Refuse work that no site could carry out, or that is more than the run asked for when it was approved.

    `labelled` and `unlabelled` are the site's numbers of images, `image_bytes` is what one takes in training.
    """
    steps, batch = assignment.steps, assignment.unlabelled_batch
    in_step = experiment.labelled_batch + batch
    if steps < 1 or batch < 0 or in_step > MOST_IN_STEP or steps * in_step > MOST_IMAGES:
        raise disclosed(
            ConfigError(
                f"the server asks for {steps} steps on {in_step} images each, expected at most {MOST_IN_STEP} images "
                f"in a step and {MOST_IMAGES} in a round"
            )
        )
    if not 1 <= assignment.round <= experiment.rounds:
        raise disclosed(
            ConfigError(f"the server asks for round {assignment.round}, expected one of 1 to {experiment.rounds}")
        )
    # The server may believe in labelled images alone, which are more than the unlabelled ones that came since.
    most = max(method.steps(labelled, there, max(batch, 1)) for there in (unlabelled, 0))
    if experiment.local_steps == "epoch" or type(method).steps is not Method.steps:
        most *= _EPOCHS
    if steps > most:
        raise disclosed(ConfigError(f"the server asks for {steps} local steps, expected {most} at most"))
    needed = steps * (experiment.labelled_batch + batch * method.needs.views) * image_bytes
    if needed > (free := psutil.virtual_memory().available):
        raise disclosed(
            ConfigError(
                f"the images of this round would take {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free"
            ),
            "the images of this round would take more memory than the site has",
        )


def relays_uploads(method: str) -> bool:
    """Whether the method's server hands what one site sent to other sites."""
    found = methods.METHODS.get(method)
    return found is not None and found.relays_uploads


def uploads_class_counts(method: str) -> bool:
    """Whether a site under this method tells how many images of each class it learnt from."""
    found = methods.METHODS.get(method)
    return found is not None and found.uploads_class_counts


def _allows(node: Mapping[str, Any], key: str, default: bool) -> bool:
    """A yes or no in a node's configuration; anything else than the two is the cautious answer, no."""
    return str(node.get(key, default)).strip().lower() == "true"
