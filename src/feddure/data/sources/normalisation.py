"""Mean and standard deviation per channel, measured in whole numbers."""

import numpy as np

_IMAGES_AT_ONCE = 1000


def measure(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel of images / 255, from a histogram of the 256 values.

    A channel without any variation gets the standard deviation 1, so that dividing by it is harmless.
    """
    channels = images.shape[-1]
    counts = np.zeros((channels, 256), dtype=np.int64)
    # In portions, because bincount widens what it is given to eight bytes a pixel.
    for start in range(0, len(images), _IMAGES_AT_ONCE):
        portion = images[start : start + _IMAGES_AT_ONCE]
        for channel in range(channels):
            counts[channel] += np.bincount(portion[..., channel].ravel(), minlength=256)
    values = np.arange(256) / 255
    weights = counts / counts.sum(axis=1, keepdims=True)
    means = weights @ values
    deviations = np.sqrt((weights * (values - means[:, None]) ** 2).sum(axis=1))
    return (
        tuple(float(mean) for mean in means),
        tuple(float(deviation) if deviation > 0 else 1.0 for deviation in deviations),
    )
