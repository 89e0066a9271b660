"""The picture of who owns which images, and the partitions behind it."""

import numpy as np

import tiny
from feddure.studies.paper import partitions as reproduce_partitions


def test_partitions_show_both_settings_for_labelled_and_unlabelled_images():
    images = tiny.dataset(size=2400, classes=10)
    canvas = reproduce_partitions.picture(images, clients=12)
    assert [axes.get_title(loc="left") for axes in canvas.axes] == ["Labelled", "Unlabelled"] * 2
    fedmatch, dir_dir = (
        reproduce_partitions.deal(images, setting, clients=12) for setting in reproduce_partitions.DEALT
    )
    assert np.ptp(fedmatch.counts(images.labels, 10)[0]) == 0
    assert np.ptp(dir_dir.counts(images.labels, 10)[0]) > 0
    assert any("internal imbalance" in text.get_text() for text in canvas.texts)
