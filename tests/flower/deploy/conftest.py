"""A federation of two sites, made once, and a site's few images."""

import shutil
import signal
import ssl

import numpy as np
import pytest
import uvicorn
from PIL import Image

from feddure.flower.app.description import Description, ServerAddress
from feddure.flower.deploy.init import initialise
from feddure.flower.deploy.layout import ServerFolder


@pytest.fixture(scope="session")
def agreed():
    return Description(
        name="trees",
        classes=("ash", "elm"),
        size=8,
        channels=1,
        mean=(0.5,),
        std=(0.25,),
        sites=("north", "south"),
        server=ServerAddress(host="127.0.0.1", port=9092),
    )


@pytest.fixture(scope="session")
def made(tmp_path_factory, agreed):
    """A federation to look at."""
    return initialise(tmp_path_factory.mktemp("made") / "trees", agreed)


@pytest.fixture
def own(tmp_path, made):
    """A federation to change."""
    return ServerFolder(shutil.copytree(made.root, tmp_path / "trees"))


@pytest.fixture
def images(tmp_path):
    """Three labelled ashes, one elm and four unlabelled images."""
    root = tmp_path / "images"
    for part, count in (("labelled/ash", 3), ("labelled/elm", 1), ("unlabelled", 4)):
        (root / part).mkdir(parents=True)
        for number in range(count):
            Image.fromarray(np.full((8, 8), 40 * number, np.uint8)).save(root / part / f"{number}.png")
    return root


@pytest.fixture
def lax_tls(monkeypatch):
    """A Python that was built to speak old versions of TLS, too."""

    def lax(make):
        def made(*arguments, **named):
            context = make(*arguments, **named)
            context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
            context.set_ciphers("ALL:@SECLEVEL=0")
            return context

        return made

    monkeypatch.setattr(ssl, "create_default_context", lax(ssl.create_default_context))
    monkeypatch.setattr(uvicorn.config, "create_ssl_context", lax(uvicorn.config.create_ssl_context))


@pytest.fixture(autouse=True)
def heard_signals():
    """Signals as in a terminal: tests that run in the background, or under nohup, inherit some of them ignored."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
