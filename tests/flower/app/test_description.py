"""federation.yaml: what it says, and what people are told when it says something else."""

import time
import unicodedata

import pytest

from feddure.errors import ConfigError
from feddure.flower.app import description as descriptions

TEXT = """\
name: skin
classes: [benign, malignant]
size: 64
channels: 3
mean: [0.5, 0.4, 0.3]
std: [0.2, 0.2, 0.1]
sites: [berlin, lyon]
"""


def changed(old: str, new: str) -> str:
    assert old in TEXT
    return TEXT.replace(old, new)


def test_a_description_is_read_with_its_defaults(tmp_path):
    path = tmp_path / "federation.yaml"
    path.write_text(TEXT)
    found = descriptions.read(path)
    assert found.classes == ("benign", "malignant")
    assert found.timeout_seconds == 600
    assert found.server.host == "127.0.0.1"
    assert (found.client("berlin"), found.client("lyon")) == (0, 1)


def test_classes_typed_on_a_mac_are_the_same_classes():
    umlaut = changed("benign", "gutartig, Läsion")
    assert (
        descriptions.parse(unicodedata.normalize("NFD", umlaut)).fingerprint()
        == descriptions.parse(umlaut).fingerprint()
    )


def test_yaml_round_trip_is_exact():
    found = descriptions.parse(changed("0.1]", "0.1234567890123456]"))
    assert descriptions.parse(found.to_yaml()) == found


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[benign, malignant]", "[malignant, benign]"),
        ("size: 64", "size: 65"),
        ("size: 64", "size: 64\nflip: false"),
        ("0.1]", "0.11]"),
        ("channels: 3\nmean: [0.5, 0.4, 0.3]\nstd: [0.2, 0.2, 0.1]", "channels: 1\nmean: [0.5]\nstd: [0.2]"),
    ],
)
def test_whatever_must_be_equal_everywhere_is_in_the_fingerprint(old, new):
    assert descriptions.parse(changed(old, new)).fingerprint() != descriptions.parse(TEXT).fingerprint()


def test_copies_that_do_not_speak_of_flips_agree_with_those_that_do():
    said = descriptions.parse(changed("size: 64", "size: 64\nflip: true"))
    assert said.fingerprint() == descriptions.parse(TEXT).fingerprint()


def test_address_timeout_and_other_sites_may_differ_between_sites():
    text = changed("[berlin, lyon]", "[berlin, lyon, oslo]")
    other = descriptions.parse(text + "server: {host: example.org, port: 443}\ntimeout_seconds: 5\n")
    assert other.fingerprint() == descriptions.parse(TEXT).fingerprint()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[]", "expected fields such as name, classes and sites"),
        ("a: [", "not valid YAML"),
        (changed("sites: [berlin, lyon]\n", ""), r"field 'sites' is missing \(Names of the sites"),
        (changed("channels: 3", "chanels: 3"), "unknown field 'chanels'.*did you mean 'channels'"),
        (changed("[benign, malignant]", "[yes, no]"), "classes: a name without quotes was read as True; write"),
        (changed("[benign, malignant]", "[benign, a/b]"), "'a/b' cannot be the name of a folder"),
        (changed("[benign, malignant]", "[Benign, benign]"), "'Benign' is there more than once"),
        (changed("mean: [0.5, 0.4, 0.3]", "mean: [0.5]"), r"mean has 1 number\(s\), expected 3"),
        (changed("0.1]", "0]"), "std.2: 0 was given, input should be greater than 0"),
        (changed("[berlin, lyon]", "[new york]"), "'new york' was given, expected letters, digits"),
        (changed("size: 64", "size: big"), "size: 'big' was given"),
        (TEXT + "server: {hots: a}", "unknown field 'server.hots'.*did you mean 'server.host'"),
    ],
)
def test_a_mistake_is_named_with_what_was_expected(text, expected):
    with pytest.raises(ConfigError, match=expected) as caught:
        descriptions.parse(text, "here.yaml")
    assert str(caught.value).startswith("here.yaml: ")


def test_a_site_that_is_not_named():
    with pytest.raises(ConfigError, match=r"site 'lion': .*there are: berlin, lyon; did you mean 'lyon'\?"):
        descriptions.parse(TEXT).client("lion")


def test_a_long_list_of_names_takes_no_long_time():
    """A server's copy may have a megabyte of them."""
    names = tuple(f"c{number}" for number in range(40_000))
    began = time.process_time()
    assert descriptions._expect_different(names) == names
    assert time.process_time() - began < 5
