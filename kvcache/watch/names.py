"""Names under which `pagewire top` shows requests and tenants.

By default, the real ids are not shown: a salt may be a secret, and a process that knows the id of a request may ask for
its pages.
"""

import hashlib
import re
import secrets
from collections.abc import Iterable
from functools import lru_cache

import msgspec

from kvcache.watch.messages import Beside, request_digest

# a key that differs in each process, so that nobody can test a guessed salt against the names that are shown
_KEY = secrets.token_bytes(16)


@lru_cache(1 << 14)
def tenant_name(salt: str) -> str:
    """Returns the name under which a salt is shown. It stays the same as long as this process runs.

    Returns an empty string if there is no salt.
    """
    if not salt:
        return ""
    return "#" + hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=4, key=_KEY).hexdigest()


class WatchNames:
    """The names under which requests and tenants are shown. If `are_clear`, requests are shown by their ids."""

    def __init__(self, *, are_clear: bool) -> None:
        self._are_clear = are_clear

    def requests(self, ids: Iterable[str]) -> list[str]:
        """Returns the name of each request."""
        return list(ids) if self._are_clear else list(map(request_digest, ids))

    def tenants(self, salts: Iterable[str]) -> list[str]:
        """Returns the name of each salt. The name does not reveal the salt."""
        return list(map(tenant_name, salts))

    def beside(self, beside: Beside) -> Beside:
        """Replace the request ids in `leases` and `pulls` with names. The keys of `phases` stay request ids."""
        if self._are_clear:
            return beside
        replace = msgspec.structs.replace
        leases = tuple(replace(one, request_id=self.requests([one.request_id])[0]) for one in beside.leases)
        pulls = tuple(replace(one, key=self.requests([one.key])[0]) for one in beside.pulls)
        return beside._replace(leases=leases, pulls=pulls)

    def error(self, text: str, ids: Iterable[str]) -> str:
        """Returns the error message of a recount, with names instead of the ids of these requests."""
        if not text or self._are_clear:
            return text
        longest_first = sorted(filter(None, ids), key=len, reverse=True)
        if not longest_first:
            return text
        # All ids are replaced in a single pass, because a digest that was inserted could contain a shorter id.
        return re.sub("|".join(map(re.escape, longest_first)), lambda found: request_digest(found[0]), text)
