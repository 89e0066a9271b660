"""Downloads from the official places, resumable, checked, and never half in place.

A download grows in `<file>.part`; what is there is kept when the connection breaks, and the next attempt asks
only for the rest. The file gets its own name once its MD5 sum has been found right; an archive is unpacked
into a folder aside, which is renamed at the end.
"""

import gzip
import hashlib
import http.client
import os
import re
import shutil
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterable
from pathlib import Path

from feddure.data.sources import find_source, sources
from feddure.data.sources.base import File, bar, default_data_dir
from feddure.errors import DataError

_ATTEMPTS = 5
_SILENCE = 30.0  # seconds without a byte before a connection counts as broken
_PIECE = 1 << 18


def fetch(name: str, data_dir: Path | None = None, mirror: str | None = None, progress: bool = False) -> Path:
    """Where the data set lies, after downloading what is not there yet.

    `mirror` is the address of a folder with the same files, to be used in place of the official one.
    """
    source = find_source(name)
    data_dir = default_data_dir() if data_dir is None else data_dir
    download = source.download
    if download is None:
        others = ", ".join(other.name for other in sources() if other.download)
        raise DataError(f"{name} is not downloaded from anywhere; those that are: {others}")
    if mirror is not None and not mirror.startswith(("http://", "https://")):
        raise DataError(f"mirror '{mirror}': expected an address that begins with http:// or https://")
    archive = data_dir / download.files[0].path
    found = source.find(data_dir)
    if found is not None and found != archive:
        return found
    unpacked = data_dir / download.folder if download.folder else None
    if unpacked is not None and unpacked.exists():
        raise DataError(f"{unpacked}: is there but not complete; move it away and fetch again")
    try:
        new = [file for file in download.files if not _is_there(data_dir / file.path, file.md5)]
        for file in new:
            url = f"{mirror.rstrip('/')}/{Path(file.path).name}" if mirror else file.url
            _download(url, data_dir / file.path, file.md5, progress)
        if unpacked is not None:
            _unpack(archive, unpacked, download.members, progress)
            if new:  # an archive that the user put there stays
                archive.unlink()
    except _Unreachable as problem:
        raise DataError(f"{problem}\n{_by_hand(download.files, data_dir)}") from None
    except OSError as error:
        raise DataError(f"{data_dir}: cannot be written ({error.strerror or error})") from None
    found = source.find(data_dir)
    if found is None:
        raise DataError(f"{data_dir}: {name} was fetched but is not complete; is it the official one?")
    return found


class _Unreachable(Exception):
    """A file could not be downloaded, or not wholly."""


def _by_hand(files: Iterable[File], data_dir: Path) -> str:
    lines = [f"  {data_dir / file.path}  from {file.url}  (MD5 {file.md5})" for file in files]
    return "\n".join(["Without a network, put these files there by other means and run the command again:", *lines])


def _is_there(path: Path, md5: str) -> bool:
    if not path.exists():
        return False
    found = _md5(path)
    if found != md5:
        raise DataError(f"{path}: has the MD5 sum {found}, expected {md5}; move it away and fetch again")
    return True


def _download(url: str, target: Path, md5: str, progress: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    for attempt in range(_ATTEMPTS):
        before = _size(part)
        problem = _receive(url, part, progress)
        if problem is None:
            break
        if _size(part) == before or attempt == _ATTEMPTS - 1:
            kept = f"; {_size(part)} bytes are kept for the next attempt" if _size(part) else ""
            raise _Unreachable(f"{url}: could not be downloaded ({problem}){kept}")
    found = _md5(part)
    if found != md5:
        part.unlink()
        raise DataError(
            f"{url}: what came has the MD5 sum {found}, expected {md5}; it was thrown away: "
            "fetch again, or use another --mirror"
        )
    part.replace(target)


def _receive(url: str, part: Path, progress: bool) -> str | None:
    """Download the rest of a file into `part`; returns what went wrong, or None when all has come."""
    have = _size(part)
    try:
        request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
        response = urllib.request.urlopen(request, timeout=_SILENCE)
    except urllib.error.HTTPError as error:
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and have:
            return None  # all of it was there already, or too much: the MD5 sum tells
        return f"HTTP {error.code} {error.reason}"
    except (OSError, http.client.HTTPException, ValueError) as error:
        return str(getattr(error, "reason", error))
    with response:
        resumed = have > 0 and _starts_at(response, have)
        start = have if resumed else 0
        length = response.headers.get("Content-Length")
        total = start + int(length) if length and length.isdigit() else None
        with (
            part.open("ab" if resumed else "wb") as out,
            bar(part.stem, total, progress, start=start, in_bytes=True) as advance,
        ):
            while True:
                try:
                    piece = response.read(_PIECE)
                except (OSError, http.client.HTTPException) as error:  # out.write's, of a full disk, goes on
                    return str(error)
                if not piece:
                    break
                out.write(piece)
                advance(len(piece))
            came = out.tell()
    return None if total is None or came == total else f"the connection broke after {came} of {total} bytes"


def _starts_at(response: http.client.HTTPResponse, position: int) -> bool:
    # A server that does not know ranges answers 200 with the whole file.
    wanted = f"bytes {position}-"
    return response.status == http.client.PARTIAL_CONTENT and response.headers.get("Content-Range", wanted).startswith(
        wanted
    )


def _unpack(archive: Path, folder: Path, members: str, progress: bool) -> None:
    """Write the plain files whose names match, each under its name's first group, and nothing else.

    Only names of the expected form are made, so no archive can write outside the folder.
    """
    pattern = re.compile(rf"(?:\./)?{members}")
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        with tarfile.open(archive) as tar, bar(f"unpacking {archive.name}", None, progress) as advance:
            for member in tar:
                match = pattern.fullmatch(member.name)
                content = tar.extractfile(member) if match and member.isreg() else None
                if match and content:
                    path = aside / match[1]
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with path.open("wb") as out:
                        shutil.copyfileobj(content, out, _PIECE)
                    advance(1)
        aside.replace(folder)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{archive}: not a whole archive ({error}); delete it and fetch again") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
