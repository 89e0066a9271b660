"""Whether a request is signed with the key of a registered site, from its headers alone.

The SuperLink asks the same, but only after it has read the whole request; so the gate asks first.
"""

import base64
import datetime
from collections.abc import Collection, Sequence

PUBLIC_KEY = b"flwr-public-key"
_SIGNATURE = b"flwr-signature"
_TIME = b"flwr-timestamp"


def is_signed(headers: Sequence[tuple[bytes, bytes]], keys: Collection[bytes]) -> bool:
    """Whether the headers hold one of the public keys, and a fresh signature made with its private key."""
    from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

    given = dict(reversed(headers))  # the first of a name counts, as for the SuperLink
    try:
        key = base64.b64decode(given[PUBLIC_KEY], validate=True)
        if key not in keys:
            return False
        signed_at = datetime.datetime.fromisoformat(given[_TIME].decode("ascii"))
        age = (datetime.datetime.now(datetime.UTC) - signed_at).total_seconds()
        if not -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE:
            return False
        signature = base64.b64decode(given[_SIGNATURE], validate=True)
    except (KeyError, ValueError, TypeError, OverflowError):
        return False
    return verify_signature(bytes_to_public_key(key), given[_TIME], signature)
