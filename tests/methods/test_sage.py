"""SAGE on the engine against its textbook twin, in float64."""

from dataclasses import replace

import pytest

from feddure import experiments
from oracle.pairing import (
    assert_same,
    experiment_of,
    federation_of,
    module_of,
    records_of,
    settings_of,
    twin_round,
    upload_of,
)
from oracle.sage_twin import SAGE


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("changes", [{}, {"half_life": 0.3}, {"threshold": 0.45, "weight": 0.5}], ids=str)
def test_a_round_equals_the_twin(norm, changes):
    options = {f"sage__{name}": value for name, value in ({"threshold": 0.4} | changes).items()}
    federation = federation_of(experiment_of("sage", norm=norm, clients_per_round=2, **options))
    told = experiments.options(federation.experiment, "sage")
    tasks = federation.tasks()
    for task, result in zip(tasks, federation.engine.run(tasks), strict=True):
        received = module_of(federation, task.received["theta"], task.received["statistics"])
        settings = replace(settings_of(federation.experiment, 0.0), threshold=told.threshold, weight=told.weight)
        twin = SAGE(received, settings, told.half_life)
        records = records_of(twin_round(twin, task))
        assert_same(result.upload, upload_of(federation, twin))
        assert_same(result.records, records)
        assert 0 < records["weight"].mean() < 1
