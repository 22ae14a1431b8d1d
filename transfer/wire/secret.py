"""One shared secret for a fleet, from which the key of metadata digests and the keys of the sockets are derived."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import zmq
import zmq.utils.z85

from transfer.errors import InvalidEngineError
from transfer.wire.keys import Keyring, private_bytes

MIN_BYTES = 16
_FILE, _VARIABLE = "file:", "env:"


class Secret:
    """A shared secret of at least 16 bytes. It must be hard to guess (for example, 32 random bytes), and is never sent.

    Attributes:
        metadata_key: 32 bytes; the key of the digests over rank metadata.
        keyring: keys of the side channel's sockets, which are the same for every process with the secret.
    """

    def __init__(self, value: bytes) -> None:
        if len(value) < MIN_BYTES:
            raise InvalidEngineError(f"the shared secret has {len(value)} bytes; at least {MIN_BYTES} are needed")
        root = hashlib.blake2b(value, digest_size=64, person=b"pagewire secret").digest()
        self.metadata_key = _derived(root, b"metadata")
        service = _key_pair(_derived(root, b"service"))
        public, secret = _key_pair(_derived(root, b"client"))
        self.keyring = Keyring(
            service_public=service[0], service_secret=service[1], public=public, secret=secret, allowed=(public,)
        )

    def __repr__(self) -> str:
        return "Secret(...)"


def _derived(root: bytes, purpose: bytes) -> bytes:
    return hashlib.blake2b(b"pagewire/1/" + purpose, key=root, digest_size=32).digest()


def _key_pair(seed: bytes) -> tuple[str, str]:
    """Returns the CURVE key pair whose secret half is these 32 bytes."""
    secret = zmq.utils.z85.encode(seed)
    return zmq.curve_public(secret).decode(), secret.decode()


def read_secret(text: str) -> Secret | None:
    """Returns the secret that a configuration names; None if it names none.

    Args:
        text: "file:" and the path of a file that only its owner may read; "env:" and the name of an environment
            variable; or the secret itself. Surrounding whitespace is removed.

    Raises:
        InvalidEngineError: there is no such file or variable, others may read the file, or the secret is too short.
    """
    if text.startswith(_FILE):
        try:
            value = private_bytes(Path(text.removeprefix(_FILE)))
        except OSError as error:
            raise InvalidEngineError(f"shared secret: {error}") from error
    elif text.startswith(_VARIABLE):
        name = text.removeprefix(_VARIABLE)
        if name not in os.environ:
            raise InvalidEngineError(f"shared secret: the environment variable {name!r} is not set")
        value = os.environ[name].encode(errors="surrogateescape")
    else:
        value = text.encode()
    return Secret(value.strip()) if text else None


def fleet_keys(
    where: str, secret: str, key: bytes = b"", keyring: Keyring | None = None
) -> tuple[bytes, Keyring | None]:
    """Returns the metadata key and the keyring.

    Both are derived from `secret` if it is set; otherwise they are `key` and `keyring`.

    Raises:
        InvalidEngineError: a key or a keyring is given in addition to a secret, the keyring is of another type, or
            `read_secret` refuses the secret.
    """
    if not isinstance(keyring, Keyring | None):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers may be untyped
        raise InvalidEngineError(f"{where}: keyring is a {type(keyring).__name__}: a Keyring or None is needed")
    shared = read_secret(secret)
    if shared is None:
        return key, keyring
    if key or keyring is not None:
        raise InvalidEngineError(
            f"{where}: got both a {'key' if key else 'keyring'} and a shared secret; give only one"
        )
    return shared.metadata_key, shared.keyring
