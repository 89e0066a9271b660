"""Where things lie, and addresses as people write them."""

import shutil

import pytest

from feddure.errors import ConfigError
from feddure.flower.deploy import layout
from feddure.flower.deploy.layout import ServerFolder


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fed.example.org", ("fed.example.org", 9092)),
        ("fed.example.org:443", ("fed.example.org", 443)),
        ("10.0.0.7:1", ("10.0.0.7", 1)),
        ("[2001:db8::7]:9443", ("2001:db8::7", 9443)),
        ("[2001:db8::7]", ("2001:db8::7", 9092)),
        ("2001:db8::7", ("2001:db8::7", 9092)),
    ],
)
def test_an_address_is_read_as_written(text, expected):
    assert layout.split_address(text, 9092) == expected


@pytest.mark.parametrize("text", ["", ":9092", "https://fed.example.org", "fed:port", "fed:0", "fed:65536"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ConfigError, match="expected HOST or HOST:PORT"):
        layout.split_address(text, 9092)


def test_a_bundle_is_found_in_the_whole_folder_and_unpacked(made, tmp_path):
    assert layout.find_bundle(made.root, "north") == made.bundle("north")
    shutil.copytree(made.bundle("north").root, tmp_path / "anywhere")
    assert layout.find_bundle(tmp_path / "anywhere", "north").root == tmp_path / "anywhere"


def test_another_sites_bundle_and_any_other_folder_are_refused(made, tmp_path):
    with pytest.raises(ConfigError, match="the bundle of site 'north', but 'south' was given"):
        layout.find_bundle(made.bundle("north").root, "south")
    with pytest.raises(ConfigError, match=r"unpack north\.zip"):
        layout.find_bundle(tmp_path, "north")


def test_a_federation_without_keys_is_refused(own):
    """An earlier version made them with `--insecure`."""
    bundle = own.bundle("north")
    for path in (own.settings, bundle.connection):
        path.write_text(path.read_text().replace("true", "false"))
    for read in (own.read, lambda: layout.read_settings(own), lambda: layout.read_connection(bundle)):
        with pytest.raises(ConfigError, match=r"--insecure.*make it anew with `feddure federate init`"):
            read()


def test_what_is_no_federation_is_told_how_to_make_one(tmp_path):
    with pytest.raises(ConfigError, match="feddure federate init"):
        ServerFolder(tmp_path).read()
