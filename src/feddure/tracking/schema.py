"""What the files of a run hold, as far as reports read it: a folder may come from anybody, and say anything.

Methods and later versions may write more than this; what is not named here is not looked at.
"""

import json
import math
from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

Count = Annotated[int, Field(ge=0, le=2**53)]
Number = Annotated[float, Field(ge=-1e100, le=1e100)]
"""None that would overflow in a mean."""
Values = list[Number | None]
Anything = Number | bool | str | list[Any] | dict[str, Any] | None

OF_CLASSES = ("per_class", "specificity", "confusion", "pseudo_accuracy_per_class", "coverage_per_class")
"""Quantities that have a value for each class."""


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class Calibration(_Part):
    images: list[Count] = Field(max_length=100)
    confidence: Values
    accuracy: Values

    @model_validator(mode="after")
    def _of_bins(self) -> "Calibration":
        if not len(self.images) == len(self.confidence) == len(self.accuracy):
            raise ValueError("expected a number for each bin of confidence")
        return self


class SiteTest(_Part):
    images: Count
    accuracy: Number


class Evaluation(_Part):
    accuracy: Number | None = None
    loss: Number | None = None
    balanced_accuracy: Number | None = None
    macro_f1: Number | None = None
    auroc: Number | None = None
    ece: Number | None = None
    per_class: Values | None = None
    specificity: Values | None = None
    confusion: list[list[Count]] | None = None
    calibration: Calibration | None = None
    by_site: dict[str, SiteTest] | None = None
    by_client: dict[str, Number] | None = None
    per_class_by_client: dict[str, list[Number]] | None = None

    @model_validator(mode="after")
    def _square(self) -> "Evaluation":
        if self.confusion is not None:
            size = len(self.confusion)
            if not size or size != len(self.per_class or ()) or any(len(row) != size for row in self.confusion):
                raise ValueError("confusion: expected a row and a column for each class of per_class")
        return self

    @model_validator(mode="after")
    def _of_clients(self) -> "Evaluation":
        alone = self.per_class_by_client or {}
        fits = all(len(shares) == len(self.per_class or ()) for shares in alone.values())
        if alone and not (fits and alone.keys() == (self.by_client or {}).keys()):
            raise ValueError("per_class_by_client: expected the clients of by_client and the classes of per_class")
        return self


class ClientDiagnostics(_Part):
    weight_auroc: Number | None = None


class Diagnostics(_Part):
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Anything]

    pseudo_accuracy_per_class: Values | None = None
    coverage_per_class: Values | None = None
    clients: list[ClientDiagnostics] | None = None


class Bytes(_Part):
    down: Number = 0
    up: Number = 0


class SiteRound(_Part):
    site: str
    problem: str = ""
    test_of_received_model: Evaluation = Evaluation()


class FederationRound(_Part):
    sites: list[SiteRound]
    drawn_but_away: list[str]
    refused: list[str]


class Round(_Part):
    """A line of metrics.jsonl."""

    round: Count
    clients: list[Count] = []
    steps: list[Count] = []
    left_out: list[Any] = []
    communication: Bytes | None = None
    train: dict[str, Anything] | None = Field(None, max_length=200)  # each has a picture
    test: Evaluation | None = None
    test_ema: Evaluation | None = None
    validation: Evaluation | None = None
    validation_ema: Evaluation | None = None
    diagnostics: Diagnostics | None = None
    federation: FederationRound = FederationRound(sites=[], drawn_but_away=[], refused=[])


class Timing(_Part):
    """A line of timing.jsonl."""

    round: Count
    seconds: Number
    clients: Count = 0


class Parameters(_Part):
    setting: str
    gamma: Number | None
    seed: int | None


class Repair(_Part):
    number: Count


class Partition(_Part):
    """partition.json."""

    classes: list[str] = []
    labelled: list[list[Count]] = []
    unlabelled: list[list[Count]] = []
    unknown: list[Count] | None = None
    sites: list[str] = []
    internal_imbalance: Number | None = None
    external_imbalance: Number | None = None
    sha256: str = ""
    parameters: Parameters = Parameters(setting="", gamma=None, seed=None)
    repairs: list[Repair] | None = None

    @model_validator(mode="after")
    def _rectangular(self) -> "Partition":
        clients = len(self.labelled)
        rows = [*self.labelled, *self.unlabelled]
        unlabelled = clients if "unlabelled" in self.model_fields_set else 0
        fits = all(len(row) == len(self.classes) for row in rows) and len(self.unlabelled) == unlabelled
        if not fits or any(len(each) not in (0, clients) for each in (self.unknown or (), self.sites)):
            raise ValueError("expected a number for each client and class")
        if "parameters" in self.model_fields_set and not (clients and self.classes):
            raise ValueError("expected one client and one class at least")
        return self


class Site(_Part):
    site: str
    labelled: Count = 0
    unlabelled: Count = 0
    unreadable: Count = 0


class Federation(_Part):
    """federation.json."""

    names: list[str] = []
    sites: list[Site] = []


def parse(text: bytes | str) -> Any:
    """JSON with finite numbers; a ValueError where it is none."""
    try:
        return json.loads(text, parse_int=_integer, parse_float=_number, parse_constant=_number)
    except RecursionError:
        raise ValueError("nested too deeply") from None


_adapter = cache(TypeAdapter)  # a file has a line a round


def problem(tree: Any, model: type) -> str:
    """What is wrong with what a file says; empty where nothing is."""
    try:
        _adapter(model).validate_python(tree)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        return f"{place}: {first['msg']}" if place else first["msg"]
    return ""


def _integer(text: str) -> int:
    if len(text) > 20:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is not finite")
    return number
