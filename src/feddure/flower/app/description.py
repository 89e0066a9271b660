"""What server and sites agree on before they train together: `federation.yaml`.

It is the only source of the classes and their order, of the images' size, channels and normalisation, and of who
takes part. Every site works under a copy; copies that differ in classes or images have different fingerprints, and the
server refuses them, so that two sites never mean different classes by the same number.
"""

import hashlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError, field_validator, model_validator

from feddure.data.sources.layouts import composed
from feddure.errors import ConfigError, did_you_mean
from feddure.files import parse_yaml

FILE_NAME = "federation.yaml"
_MAY_DIFFER = {"server", "timeout_seconds", "sites"}
"""Sites are added at the end of the list, so that the numbers of those before stay."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ServerAddress(_Section):
    """Where sites reach the server."""

    host: str = Field("127.0.0.1", min_length=1, description="Name or address under which sites reach the server.")
    port: int = Field(9092, ge=1, le=65535, description="Port of the server for sites and for starting runs.")


class Description(_Section):
    """A federation of sites that keep their images."""

    name: str = Field(min_length=1, description="What the federation is called.")
    classes: tuple[str, ...] = Field(description="Class names; a class's number is its position.")
    size: int = Field(32, ge=8, le=4096, description="Height and width of images in pixels after reading.")
    channels: Literal[1, 3] = Field(3, description="1 for grey images, 3 for colour.")
    mean: tuple[float, ...] = Field(description="Mean of images / 255, one number for each channel.")
    std: tuple[PositiveFloat, ...] = Field(description="Deviation of images / 255, one number for each channel.")
    flip: bool = Field(True, description="Whether views may be mirrored: not where left and right tell classes apart.")
    sites: tuple[str, ...] = Field(description="Names of the sites; a site's client number is its position.")
    server: ServerAddress = ServerAddress()
    timeout_seconds: float = Field(600.0, gt=0, description="Longest time the server waits for the sites of a round.")

    @field_validator("classes", "sites", mode="before")
    @classmethod
    def _expect_texts(cls, values: Any) -> Any:
        for value in values if isinstance(values, list | tuple) else ():
            if not isinstance(value, str):  # YAML reads no, 1 and 2024-01-01 as something else than text
                raise ValueError(f"a name without quotes was read as {value!r}; write such names in quotes")
        return values

    @field_validator("classes")
    @classmethod
    def _check_classes(cls, classes: tuple[str, ...]) -> tuple[str, ...]:
        if len(classes) < 2:
            raise ValueError("expected 2 or more names")
        for name in classes:
            if not name or name != name.strip() or name.startswith(".") or re.search(r'[/\\<>:"|?*\x00-\x1f]', name):
                raise ValueError(f"'{name}' cannot be the name of a folder, expected names of the class folders")
        return _expect_different(tuple(map(composed, classes)))

    @field_validator("sites")
    @classmethod
    def _check_sites(cls, sites: tuple[str, ...]) -> tuple[str, ...]:
        if not sites:
            raise ValueError("expected 1 or more names")
        for name in sites:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):  # they become file names and options
                raise ValueError(f"'{name}' was given, expected letters, digits, '.', '_' and '-', such as 'site-a'")
        return _expect_different(sites)

    @model_validator(mode="after")
    def _check_normalisation(self) -> "Description":
        for name in ("mean", "std"):
            count = len(getattr(self, name))
            if count != self.channels:
                raise ValueError(f"{name} has {count} number(s), expected {self.channels}, one for each channel")
        return self

    def to_yaml(self) -> str:
        """The description as text that `parse` reads back to an equal object."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)

    def fingerprint(self) -> str:
        """A hash of all that must be equal at every site; address, timeout and who else takes part may differ."""
        usual = {"flip"} if self.flip else set()  # copies of before there was this field agree with it
        fields = self.model_dump(mode="json", exclude=_MAY_DIFFER | usual)
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

    def differences(self, other: "Description") -> list[str]:
        """The fields that must be equal at every site, but are not."""
        fields = [name for name in type(self).model_fields if name not in _MAY_DIFFER]
        return [name for name in fields if getattr(self, name) != getattr(other, name)]

    def client(self, site: str) -> int:
        """The client number of a site."""
        if site not in self.sites:
            raise ConfigError(
                f"site '{site}': the federation '{self.name}' has no such site; there are: "
                f"{', '.join(self.sites)}{did_you_mean(site, self.sites)}"
            )
        return self.sites.index(site)


def read(path: Path) -> Description:
    """The description in a file."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); expected a {FILE_NAME}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file; expected a {FILE_NAME}") from None
    return parse(text, str(path))


def parse(text: str, where: str = FILE_NAME) -> Description:
    """The description in a text; `where` names its source in errors."""
    try:
        tree = parse_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not valid YAML ({' '.join(str(error).split())})") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{where}: expected fields such as name, classes and sites, one a line")
    try:
        return Description.model_validate(tree)
    except ValidationError as error:
        problems = [f"{where}: {_explain(detail)}" for detail in error.errors()]
        raise ConfigError("\n".join(problems)) from None


def _expect_different(names: tuple[str, ...]) -> tuple[str, ...]:
    # Sites may keep their images on a file system that does not tell A from a.
    times = Counter(name.lower() for name in names)
    for name in names:
        if times[name.lower()] > 1:
            raise ValueError(f"'{name}' is there more than once (capital and small letters count as the same)")
    return names


def _explain(detail: Any) -> str:
    field = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        known = (*Description.model_fields, *(f"server.{name}" for name in ServerAddress.model_fields))
        return f"unknown field '{field}'; there are: {', '.join(known)}{did_you_mean(field, known)}"
    if detail["type"] == "missing":
        return f"field '{field}' is missing ({Description.model_fields[field].description})"
    if detail["type"] == "value_error":
        message = detail["msg"].removeprefix("Value error, ")
        return f"{field}: {message}" if field else message
    return f"{field}: {detail['input']!r} was given, {detail['msg'][:1].lower()}{detail['msg'][1:]}"
