"""Classes of image files: the numbers of training itself, from a folder of ordinary files."""

import numpy as np
import pytest
from PIL import Image

import feddure
import folders
from feddure import data
from feddure.data import load as load_dataset
from feddure.errors import ConfigError, DataError, FeddureWarning
from feddure.serving.predict import Prediction, evaluate, find_images

pytestmark = pytest.mark.usefixtures("quiet")


def save(pixels, path, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(path, **options)
    return path


def save_tests(images, folder):
    """The test images as files, each in the folder of its class."""
    for number, (pixels, label) in enumerate(zip(images.test_images, images.test_labels, strict=True)):
        save(pixels, folder / str(label) / f"{number:04}.png")
    return folder


def confusion(predictions, classes):
    """As in metrics.jsonl; a file's folder says its class."""
    counts = np.zeros((len(classes), len(classes)), dtype=int)
    for prediction in predictions:
        counts[int(prediction.file.parent.name), classes.index(prediction.label)] += 1
    return counts.tolist()


def test_a_trained_model_has_the_accuracy_on_files_that_its_run_reports(tmp_path, trained, exported):
    files = save_tests(folders.IMAGES, tmp_path / "tests")
    wanted = feddure.Run(trained).metrics[-1]["test"]["confusion"]
    for source, batch in zip((trained, exported["safetensors"], exported["onnx"]), (1, 3, 100), strict=True):
        assert confusion(feddure.predict(source, files, batch=batch), folders.IMAGES.classes) == wanted


def test_folders_of_classes_say_how_good_the_model_is(tmp_path):
    def says(place, label):
        return Prediction(tmp_path / place, ((label, 1.0),))

    found = [says(f"tests/ant/{n}.png", "ant") for n in range(8)] + [says(f"tests/ant/{n}.png", "bee") for n in "xy"]
    found += [says("tests/bee/deep/0.png", "bee"), says("tests/other/1.png", "ant"), says("2.png", "bee")]
    found += [Prediction(tmp_path / "tests" / "bee" / "bad.png", (), "is damaged")]
    said = evaluate(found, [tmp_path / "2.png", tmp_path / "tests"], ("ant", "bee", "cow"))
    assert (said["images"], said["accuracy"]) == (11, 9 / 11)
    assert said["other_folders"] == ["other"]
    ant, bee = said["classes"]
    assert (ant["images"], ant["sensitivity"], ant["specificity"]) == (10, 0.8, 1)
    assert ant["sensitivity_interval"] == pytest.approx([0.4902, 0.9433], abs=1e-4)  # Wilson (1927), 8 of 10
    assert (bee["images"], bee["sensitivity"], bee["specificity"]) == (1, 1, 0.8)
    assert evaluate(found, [tmp_path], ("ant", "bee")) is None


def test_files_are_decoded_as_training_decodes_its_folders(tmp_path):
    """Photographs of any size and kind: what the folder source makes of them is what the model sees."""
    random = np.random.RandomState(0)
    root = tmp_path / "data"
    for part in ("labelled", "test"):
        for kind in ("ant", "bee"):
            wide, grey = (random.randint(0, 256, size=shape).astype(np.uint8) for shape in ((30, 50, 3), (21, 17, 1)))
            save(wide, root / part / kind / "wide.jpg")
            save(grey, root / part / kind / "deep" / "grey.png")
            save(np.dstack([wide, wide[..., :1]]), root / part / kind / "transparent.png")
    images = load_dataset(f"folder:{root}?size=12&channels=3")
    small = {"partition.clients": 1, "partition.labels_per_class": 1, "clients_per_round": 1}
    folder = folders.execute(tmp_path / "run", images=images, **small).folder
    model = feddure.load_model(folder)
    wanted = model(images.test_images)
    found = feddure.predict(model, root / "test")
    assert [prediction.file.name for prediction in found] == 2 * ["grey.png", "transparent.png", "wide.jpg"]
    shares = [[dict(prediction.ranking)[name] for name in images.classes] for prediction in found]
    assert np.allclose(shares, wanted, atol=1e-6)


def test_the_depth_of_training_is_the_depth_of_prediction(tmp_path):
    """12-bit values in 16-bit files: the run's data set says so, and its exported files know it."""
    random = np.random.RandomState(0)
    for kind in ("ant", "bee"):
        for part in ("labelled", "test"):
            values = random.randint(0, 4096, size=(12, 12, 1)).astype(np.uint16)
            for number in range(2):
                save(values, tmp_path / "data" / part / kind / f"{number}.png")
    name = f"folder:{tmp_path / 'data'}?size=12&channels=1&depth=12"
    images = data.load(name)
    small = {"partition.clients": 1, "partition.labels_per_class": 1, "clients_per_round": 1}
    folder = folders.execute(tmp_path / "run", images=images, dataset=name, **small).folder
    for source in (folder, feddure.export(folder, format="onnx")):
        model = feddure.load_model(source)
        found = feddure.predict(model, tmp_path / "data" / "test")
        shares = [[dict(prediction.ranking)[name] for name in images.classes] for prediction in found]
        assert np.allclose(shares, model(images.test_images), atol=1e-6)


def test_an_unreadable_file_is_named_and_the_others_go_on(tmp_path, trained):
    good = save(folders.IMAGES.test_images[0], tmp_path / "photos" / "b.png")
    (tmp_path / "photos" / "a.png").write_text("no picture")
    (tmp_path / "photos" / "c.png").write_bytes(good.read_bytes()[:60])
    (tmp_path / "photos" / "d.png").symlink_to("gone.png")
    bad, fine, cut, gone = feddure.predict(str(trained), [str(tmp_path / "photos")], batch=2)
    assert "not an image" in bad.problem
    assert "damaged" in cut.problem
    assert gone.problem
    assert fine.problem is None
    assert sorted(dict(fine.ranking)) == list("abcd")
    assert (fine.label, fine.probability) == fine.ranking[0] == max(fine.ranking, key=lambda share: share[1])
    assert (bad.label, bad.probability, bad.ranking) == (None, None, ())


def test_files_and_folders_in_the_order_given(tmp_path):
    for name in ("z.png", "photos/b.png", "photos/a/1.png", "photos/a/0.png", "photos/.hidden.png", "photos/Thumbs.db"):
        save(folders.IMAGES.images[0], tmp_path / f"{name}.png").rename(tmp_path / name)
    found = find_images([tmp_path / "z.png", tmp_path / "photos"])
    names = [str(file.relative_to(tmp_path)) for file in found]
    assert names == ["z.png", "photos/a/0.png", "photos/a/1.png", "photos/b.png"]


def test_places_that_are_refused(tmp_path, trained):
    (tmp_path / "empty").mkdir()
    (tmp_path / "round").mkdir()
    (tmp_path / "round" / "again").symlink_to(tmp_path / "round")
    for names, message in (
        (["typo.png"], r"typo\.png: there is no such image or folder"),
        (["empty"], "empty: no image in it"),
        ([], "no image"),
        (["round"], "a link to a folder that is read already"),
    ):
        with pytest.raises(DataError, match=message):
            find_images([tmp_path / name for name in names])
    with pytest.raises(ConfigError, match="batch: 0 was given"):
        feddure.predict(trained, save(folders.IMAGES.images[0], tmp_path / "one.png"), batch=0)


def test_files_that_become_nearly_black_are_noted_once(tmp_path, trained):
    for number in range(3):
        values = np.random.RandomState(number).randint(0, 4096, size=(8, 8, 1)).astype(np.uint16)
        save(values, tmp_path / "deep" / f"{number}.png")
    save(folders.IMAGES.test_images[0], tmp_path / "deep" / "eight.png")
    with pytest.warns(FeddureWarning, match=r"3 16-bit image.* such as .*deep/0\.png.*: were they 12-bit\?") as noted:
        found = feddure.predict(trained, tmp_path / "deep", batch=2)
    assert len(noted) == 1
    assert "folder:PATH?depth=12" in str(noted[0].message)
    assert all(prediction.problem is None for prediction in found)
