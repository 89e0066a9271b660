"""Numbers of images as sites first gave them, kept at the server: a site weighs what was agreed.

A later claim of fewer images counts at once, since nobody gains by it; one of more counts once the operator approves.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock

from feddure.errors import ConfigError, RunError
from feddure.files import write_json
from feddure.simulation.server import ImageCounts

FILE = "sites.json"


@dataclass(frozen=True)
class Registration:
    """What counts for a site, and what it says where that is something else."""

    counts: ImageCounts
    claimed: ImageCounts | None = None

    def limit(self, claimed: ImageCounts) -> ImageCounts:
        """What counts of a claim."""
        counts = self.counts
        return ImageCounts(min(claimed.labelled, counts.labelled), min(claimed.unlabelled, counts.unlabelled))


class Registry:
    """The file of registrations; without a folder every claim counts."""

    def __init__(self, folder: Path | None):
        self._path = folder / FILE if folder is not None else None

    def read(self) -> dict[str, Registration]:
        """All registrations by site."""
        try:
            tree = json.loads(self._path.read_bytes()) if self._path is not None and self._path.exists() else {}
            return {
                site: Registration(
                    ImageCounts(**entry["counts"]), ImageCounts(**entry["claimed"]) if entry["claimed"] else None
                )
                for site, entry in tree.items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise RunError(f"{self._path}: cannot be read; restore it from a copy") from None

    def counts(self, site: str, claimed: ImageCounts) -> ImageCounts:
        """What counts for a site that says this; its first claim is registered."""
        if self._path is None:
            return claimed
        with self._locked():
            known = self.read()
            first = known.get(site, Registration(claimed)).counts
            now = Registration(first, claimed if claimed != first else None)
            if known.get(site) != now:
                self._write(known | {site: now})
        return now.limit(claimed)

    def approve(self, site: str) -> ImageCounts:
        """Register what a site says now."""
        with self._locked():
            known = self.read()
            if site not in known:
                raise ConfigError(f"site '{site}': no run has heard of it; there are: {', '.join(known) or 'none'}")
            counts = known[site].claimed or known[site].counts
            self._write(known | {site: Registration(counts)})
        return counts

    def forget(self, site: str) -> None:
        """Let a site's next claim be its first."""
        with self._locked():
            self._write({name: entry for name, entry in self.read().items() if name != site})

    @contextmanager
    def _locked(self) -> Iterator[None]:
        assert self._path is not None
        with FileLock(self._path.with_name(f".{FILE}.lock")):
            yield

    def _write(self, known: dict[str, Registration]) -> None:
        assert self._path is not None
        write_json(self._path, {site: asdict(entry) for site, entry in known.items()}, RunError, durable=True)
