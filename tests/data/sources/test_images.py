"""The rule that makes an image file a square of 8-bit pixels, and the processes that apply it."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from feddure.data.sources import images
from feddure.data.sources.images import Rule, decode
from feddure.errors import DataError, FeddureWarning


def save(path: Path, image: Image.Image, **options: object) -> Path:
    image.save(path, **options)
    return path


def read(path: Path, size: int, channels: int) -> np.ndarray:
    return images.read(path, Rule(size, channels))[0]


def noise(size: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8))


def test_the_middle_square_is_taken_and_one_of_the_right_size_keeps_its_pixels(tmp_path):
    stripes = np.zeros((10, 30, 3), dtype=np.uint8)
    stripes[:, :10], stripes[:, 10:20], stripes[:, 20:] = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    for pixels in (stripes, stripes.transpose(1, 0, 2)):
        assert (read(save(tmp_path / "a.png", Image.fromarray(pixels)), 10, 3) == (0, 255, 0)).all()
    np.testing.assert_array_equal(read(save(tmp_path / "b.png", noise(32)), 32, 3), np.asarray(noise(32)))


def test_shrinking_averages_and_does_not_skip_pixels(tmp_path):
    board = np.indices((64, 96)).sum(axis=0) % 2 * 255
    shrunk = read(save(tmp_path / "a.png", Image.fromarray(board.astype(np.uint8))), 8, 1)
    assert abs(shrunk[1:-1, 1:-1].astype(int) - 127).max() <= 3


def test_small_images_grow_and_long_ones_do_not_vanish(tmp_path):
    assert (read(save(tmp_path / "a.png", Image.new("RGB", (1, 1), (9, 8, 7))), 16, 3) == (9, 8, 7)).all()
    assert read(save(tmp_path / "b.png", Image.new("L", (700, 3), 5)), 16, 1).shape == (16, 16, 1)


def test_the_orientation_in_exif_is_applied(tmp_path):
    upright = np.zeros((16, 16, 3), dtype=np.uint8)
    upright[:8] = 255  # the sky is above
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: to be shown rotated by 90° clockwise
    stored = Image.fromarray(np.rot90(upright).copy())
    pixels = read(save(tmp_path / "a.jpg", stored, exif=exif, quality=95), 16, 3)
    assert pixels[:6].mean() > 240
    assert pixels[10:].mean() < 15


def test_sixteen_bits_are_scaled_to_eight(tmp_path):
    deep = np.array([[0, 257 * 100], [257 * 100 + 128, 65535]], dtype=np.uint16)
    for name in ("a.png", "a.tif"):
        pixels = read(save(tmp_path / name, Image.fromarray(deep)), 2, 1)
        assert pixels[..., 0].tolist() == [[0, 100], [100, 255]]
    assert read(tmp_path / "a.png", 2, 3)[1, 1].tolist() == [255, 255, 255]


def test_transparency_is_laid_over_black(tmp_path):
    half = Image.new("RGBA", (4, 4), (200, 100, 50, 128))
    assert abs(read(save(tmp_path / "rgba.png", half), 4, 3)[0, 0].astype(int) - (100, 50, 25)).max() <= 1
    grey = Image.new("LA", (4, 4), (200, 0))
    assert read(save(tmp_path / "la.png", grey), 4, 1).max() == 0
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([10, 20, 30, 200, 100, 50])
    path = save(tmp_path / "transparent.png", palette, transparency=1)
    assert read(path, 4, 3).max() == 0
    path = save(tmp_path / "opaque.png", palette)
    assert read(path, 4, 3)[0, 0].tolist() == [200, 100, 50]


@pytest.mark.parametrize(
    ("image", "name", "expected"),
    [
        (Image.new("CMYK", (8, 8), (0, 0, 0, 0)), "a.tif", (255, 255, 255)),
        (Image.new("CMYK", (8, 8), (0, 0, 0, 0)), "a.jpg", (255, 255, 255)),
        (Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "a.tif", (255, 0, 0)),
        (Image.new("1", (8, 8), 1), "a.png", (255, 255, 255)),
        (Image.new("L", (8, 8), 77), "a.png", (77, 77, 77)),
        (Image.new("P", (8, 8), 0), "a.gif", (0, 0, 0)),
        (Image.new("RGB", (8, 8), (30, 20, 10)), "a.webp", (30, 20, 10)),
        (Image.new("RGB", (8, 8), (30, 20, 10)), "a.bmp", (30, 20, 10)),
    ],
)
def test_other_modes_become_colour(tmp_path, image, name, expected):
    options = {"lossless": True} if name.endswith("webp") else {}
    pixels = read(save(tmp_path / name, image, **options), 8, 3)
    assert abs(pixels.astype(int) - expected).max() <= 2


def test_colour_becomes_grey_for_one_channel(tmp_path):
    path = save(tmp_path / "a.png", Image.new("RGB", (8, 8), (255, 0, 0)))
    assert read(path, 8, 1).shape == (8, 8, 1)
    assert read(path, 8, 1)[0, 0, 0] == 76  # 0.299 of 255


def test_pixels_of_unknown_range_are_refused(tmp_path):
    with pytest.raises(images.Unreadable, match="floating-point"):
        read(save(tmp_path / "a.tif", Image.new("F", (8, 8), 0.5)), 8, 3)
    with pytest.raises(images.Unreadable, match="more than 16 bits"):
        read(save(tmp_path / "b.tif", Image.new("I", (8, 8), 70000)), 8, 3)


def many(folder: Path, count: int = 9) -> list[Path]:
    return [save(folder / f"{number}.png", noise(12, number)) for number in range(count)]


@pytest.fixture
def in_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "FILES_PER_PROCESS", 2)


def test_processes_give_the_same_pixels_in_the_same_order(tmp_path, in_processes):
    paths = many(tmp_path)
    for path in paths[3:]:
        Image.fromarray(np.full((12, 12), 3000, dtype=np.uint16)).save(path)
    expected = np.stack([read(path, 8, 3) for path in paths])
    with pytest.warns(FeddureWarning, match="^6 16-bit image.*were they 12-bit"):
        np.testing.assert_array_equal(decode(paths, Rule(8, 3), "decoding").images, expected)


@pytest.mark.parametrize("files_per_process", [2, 64])
def test_every_file_that_is_no_image_is_told(tmp_path, monkeypatch, files_per_process):
    monkeypatch.setattr(images, "FILES_PER_PROCESS", files_per_process)
    paths = many(tmp_path)
    for path in paths[1::2]:
        path.write_text("no image")
    decoded = decode(paths, Rule(8, 3), "decoding")
    assert list(decoded.problems) == [1, 3, 5, 7]
    for position in range(0, 9, 2):
        np.testing.assert_array_equal(decoded.images[position], read(paths[position], 8, 3))


def test_a_process_that_dies_is_an_error(tmp_path, in_processes, monkeypatch):
    program = tmp_path / "dies.py"
    program.write_text("raise SystemExit(3)")
    monkeypatch.setattr(images, "__file__", str(program))
    with pytest.raises(DataError, match="ended early"):
        decode(many(tmp_path), Rule(8, 3), "decoding")
