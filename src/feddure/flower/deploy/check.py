"""`feddure federate check`: what a site looks at before it joins."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from feddure.data.sources.images import FULL_DEPTH
from feddure.errors import FeddureError
from feddure.flower.app import description as descriptions
from feddure.flower.app import site_data
from feddure.flower.deploy import certificates
from feddure.flower.deploy.connection import clock_problem, reach
from feddure.flower.deploy.layout import Bundle, Connection, read_connection

T = TypeVar("T")
Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; a problem would keep the site from training."""

    level: Level
    what: str
    text: str


@dataclass
class CheckUp:
    """All that was found at a site."""

    site: str
    findings: list[Finding] = field(default_factory=list)
    labelled: dict[str, int] = field(default_factory=dict)
    unlabelled: int = 0
    tests: int = 0
    unreadable: list[tuple[str, str]] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(finding.level != "problem" for finding in self.findings)


def check(
    bundle: Bundle,
    site: str,
    data: Path,
    connect: bool = True,
    cache: Path | None = None,
    depth: int = FULL_DEPTH,
) -> CheckUp:
    """Look at a site's images, keys and certificates, and at its way to the server; `cache` keeps pixels."""
    found = CheckUp(site)
    description = _attempt(found, "federation", lambda: descriptions.read(bundle.description))
    if description is not None:
        _attempt(found, "federation", lambda: description.client(site))
        if found.passed:
            text = f"{description.name}: {len(description.classes)} classes, {len(description.sites)} sites"
            found.findings.append(Finding("ok", "federation", text))
        _check_images(found, data, description, cache, depth)
    connection = _attempt(found, "connection", lambda: read_connection(bundle))
    if connection is not None and connection.secure:
        found.findings += _check_keys(bundle)
        found.findings += _check_authority(bundle)
    elif connection is not None:
        found.findings.append(Finding("note", "keys", "made with --insecure: no encryption, and anybody can join"))
    if connection is not None and connect:
        found.findings += _check_connection(bundle, connection)
    return found


def _check_images(
    found: CheckUp, data: Path, description: descriptions.Description, cache: Path | None, depth: int
) -> None:
    images = _attempt(found, "images", lambda: site_data.load(data, description, cache, progress=True, depth=depth))
    if images is None:
        return
    found.labelled, found.unlabelled = images.counts(), len(images.unlabelled)
    found.tests = len(images.dataset.test_images)
    found.unreadable = [(entry.file, entry.reason) for entry in images.unreadable]
    labelled = sum(found.labelled.values())
    found.findings.append(Finding("ok", "images", f"{labelled:,} labelled, {found.unlabelled:,} unlabelled"))
    if found.unreadable:
        text = f"{len(found.unreadable):,} unreadable file(s) left out; they are named below"
        found.findings.append(Finding("note", "images", text))
    if not labelled:
        text = "no labelled image: only methods that learn from unlabelled images alone train here"
        found.findings.append(Finding("note", "images", text))
    elif not found.unlabelled:
        found.findings.append(Finding("note", "images", "no unlabelled image: only labels are learned from here"))


def _check_keys(bundle: Bundle) -> Iterator[Finding]:
    try:
        private = certificates.read_private_key(bundle.key)
        if not certificates.same_key(private.public_key(), certificates.read_public_key(bundle.public_key)):
            text = f"{bundle.key} does not belong to {bundle.public_key}, the key that the server knows"
            yield Finding("problem", "key", text)
            return
    except FeddureError as problem:
        yield Finding("problem", "key", str(problem))
        return
    if certificates.is_private(bundle.key):
        yield Finding("ok", "key", f"{bundle.key.name} fits {bundle.public_key.name}, and only its owner can read it")
    else:
        yield Finding("problem", "key", f"{bundle.key}: others can read this private key: chmod 600 {bundle.key}")


def _check_authority(bundle: Bundle) -> Iterator[Finding]:
    try:
        validity = certificates.validity(certificates.read_certificate(bundle.authority))
    except FeddureError as problem:
        yield Finding("problem", "authority", str(problem))
        return
    problem_text = validity.problem(str(bundle.authority))
    if problem_text is not None:
        yield Finding("problem", "authority", problem_text)
    else:
        yield _ending(validity, "authority", f"{bundle.authority.name} is valid")


def _check_connection(bundle: Bundle, connection: Connection) -> Iterator[Finding]:
    try:
        reached = reach(connection, bundle.authority)
    except FeddureError as problem:
        yield Finding("problem", "server", str(problem))
        return
    if reached.outcome != "ok":
        yield Finding("problem", "server", reached.text)
    elif reached.certificate is None:
        yield Finding("ok", "server", reached.text)
    else:
        yield _ending(reached.certificate, "server", reached.text)
        wrong_clock = clock_problem(connection, bundle.authority)
        if wrong_clock:
            yield Finding("problem", "clock", wrong_clock)


def _ending(validity: certificates.Validity, what: str, text: str) -> Finding:
    left = validity.days_left()
    level: Level = "note" if left <= certificates.WARN_DAYS else "ok"
    return Finding(level, what, f"{text} until {validity.ends:%Y-%m-%d} ({left:,} days)")


def _attempt(found: CheckUp, what: str, attempt: Callable[[], T]) -> T | None:
    """What an attempt gives; where it fails, its message is a problem of the site."""
    try:
        return attempt()
    except FeddureError as problem:
        found.findings.append(Finding("problem", what, str(problem)))
        return None
