"""Names under which a watch shows requests and tenants.

A salt may be a secret, and whoever knows a request's id may ask for its pages.
"""

import hashlib
import re
import secrets
from collections.abc import Callable, Iterable

import msgspec

from kvcache.watched import Beside, request_digest

_KEY = secrets.token_bytes(16)  # of this process: nobody can try salts out against what is shown
_MOST_KEPT = 1 << 14


def tenant_name(salt: str) -> str:
    """The name of a salt, which stays the same as long as this process runs. Empty if there is none."""
    if not salt:
        return ""
    return "#" + hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=4, key=_KEY).hexdigest()


class WatchNames:
    """Names of requests and tenants as they are shown; `are_clear`: those of requests are their ids."""

    def __init__(self, *, are_clear: bool) -> None:
        self._are_clear = are_clear
        self._requests: dict[str, str] = {}
        self._tenants: dict[str, str] = {}

    def requests(self, ids: Iterable[str]) -> list[str]:
        """The name of each request."""
        return list(ids) if self._are_clear else [_kept(self._requests, one, request_digest) for one in ids]

    def tenants(self, salts: Iterable[str]) -> list[str]:
        """The name of each salt; never the salt."""
        return [_kept(self._tenants, one, tenant_name) for one in salts]

    def beside(self, beside: Beside) -> Beside:
        """Leases and pulls under those names. Phases keep their ids: they are looked up by them."""
        if self._are_clear:
            return beside
        replace = msgspec.structs.replace
        leases = tuple(replace(one, request_id=self.requests([one.request_id])[0]) for one in beside.leases)
        pulls = tuple(replace(one, key=self.requests([one.key])[0]) for one in beside.pulls)
        return beside._replace(leases=leases, pulls=pulls)

    def error(self, text: str, ids: Iterable[str]) -> str:
        """What a recount has found, without the ids of these requests."""
        if not text or self._are_clear:
            return text
        longest_first = sorted(filter(None, ids), key=len, reverse=True)
        if not longest_first:
            return text
        # In one pass: what stands for an id may have a shorter one in it.
        return re.sub("|".join(map(re.escape, longest_first)), lambda found: request_digest(found[0]), text)


def _kept(known: dict[str, str], name: str, make: Callable[[str], str]) -> str:
    if (found := known.get(name)) is None:
        if len(known) >= _MOST_KEPT:
            known.clear()
        found = known[name] = make(name)
    return found
