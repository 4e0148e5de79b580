"""The secret of a job, and how two of its processes prove to each other that they know it, without sending it.

    accepting process  →  a random challenge A
    opening process    →  a random challenge B, and HMAC(secret, "opened", A, B)
    accepting process  →  HMAC(secret, "accepted", A, B)

Nothing else is read or sent before. The HMAC is that of RFC 2104 with SHA-256. A secret comes from who starts the job:

    TFDIST_SECRET          set by the launcher, and by the scripts that it writes for Slurm and Kubernetes
    TFDIST_SECRET_FILE     a file that only its owner can read, on each host
    a file of the user     if all processes of the job are on this host, and neither variable is set

Without any, all proofs are valid, and a job of several hosts accepts only connections from the addresses of its hosts.

Synopsis:

    >>> accepting, opening = Acceptance(b"key"), Opening(b"key")
    >>> proof = opening.respond(accepting.challenge())
    >>> opening.is_proved_by(accepting.respond(proof))
    True
    >>> Acceptance(b"another key").respond(proof) is None
    True
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, ValidationError

from tfdist import machine
from tfdist.errors import UsageError
from tfdist.jobs.job_environment import SECRET, SECRET_FILE
from tfdist.jobs.world import World

SHORTEST_SECRET_BYTES = 16
LONGEST_SECRET_BYTES = 4096
CHALLENGE_BYTES = 16


class _Challenge(BaseModel):
    tfdist: Literal[1]
    challenge: str = Field(min_length=2 * CHALLENGE_BYTES, max_length=2 * CHALLENGE_BYTES)


class _Proof(_Challenge):
    proof: str


class Acceptance:
    """The part of the process that accepts a connection.

    Args:
        key: the secret.
    """

    def __init__(self, key: bytes):
        self._key = key
        self._challenge = secrets.token_hex(CHALLENGE_BYTES)

    def challenge(self) -> bytes:
        """The first line of the connection."""
        return _line(_Challenge(tfdist=1, challenge=self._challenge))

    def respond(self, line: bytes) -> bytes | None:
        """The answer to the other side's proof; `None` if it does not know the secret."""
        try:
            received = _Proof.model_validate_json(line)
        except ValidationError:
            return None
        challenges = (self._challenge, received.challenge)
        if not hmac.compare_digest(received.proof.encode(), proof(self._key, "opened", *challenges).encode()):
            return None
        return proof(self._key, "accepted", *challenges).encode() + b"\n"


class Opening:
    """The part of the process that opens a connection.

    Args:
        key: the secret.
    """

    def __init__(self, key: bytes):
        self._key = key
        self._challenge = secrets.token_hex(CHALLENGE_BYTES)
        self._expected = b""

    def respond(self, line: bytes) -> bytes:
        """The answer to the first line of the connection.

        Raises:
            ValueError: the line is not a challenge.
        """
        challenges = (_Challenge.model_validate_json(line).challenge, self._challenge)
        self._expected = proof(self._key, "accepted", *challenges).encode()
        return _line(_Proof(tfdist=1, challenge=self._challenge, proof=proof(self._key, "opened", *challenges)))

    def is_proved_by(self, line: bytes | None) -> bool:
        """Whether the other side's answer shows that it knows the secret."""
        return bool(self._expected) and hmac.compare_digest((line or b"").strip(), self._expected)


def proof(key: bytes, *parts: object) -> str:
    """The HMAC of `parts`, which contain no line breaks, in hexadecimal."""
    return hmac.digest(key, "\n".join(map(str, parts)).encode(), "sha256").hex()


def of_job(world: World, environment: Mapping[str, str] = os.environ) -> bytes:
    """The secret of the job; empty if it has none.

    Raises:
        UsageError: the secret is too short, or its file cannot be read or can be read by other users.
    """
    if text := environment.get(SECRET):
        return _checked(text.encode(), f"`{SECRET}`")
    if path := environment.get(SECRET_FILE):
        return _from_file(Path(path))
    if world.local_world_size == world.world_size:
        return _of_user(environment)
    return b""


def _from_file(path: Path) -> bytes:
    what = f"`{SECRET_FILE}`, `{path}`,"
    try:
        secret = _read(path)
    except OSError as error:
        raise UsageError(
            f"{what} cannot be read: {error.strerror or error}", f"correct or unset `{SECRET_FILE}`"
        ) from error
    if secret is None:
        raise UsageError(
            f"{what} is not a file that only its owner can access",
            f"make it this user's own, and run `chmod 600 {path}`",
        )
    return _checked(secret, what)


def _checked(secret: bytes, what: str) -> bytes:
    secret = secret.strip()
    if len(secret) < SHORTEST_SECRET_BYTES:
        raise UsageError(
            f"{what} has {len(secret)} bytes, and a secret has at least {SHORTEST_SECRET_BYTES}",
            "write random bytes to it, such as the output of `openssl rand -hex 32`",
        )
    return secret


def _read(path: Path) -> bytes | None:
    """The content of a file; `None` if other users can access it, or it is not a file.

    Raises:
        OSError: it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO would block
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        is_private = status.st_uid in (os.geteuid(), 0) and not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        return file.read(LONGEST_SECRET_BYTES) if stat.S_ISREG(status.st_mode) and is_private else None


def _of_user(environment: Mapping[str, str]) -> bytes:
    """A secret of this user on this host, which the first process creates; empty if there is no place for it."""
    with contextlib.suppress(OSError, RuntimeError):
        folder = machine.cache_folder(environment)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "secret"
        if not path.exists():
            # Other processes of the job may do the same at this moment: a link is created once, and complete.
            draft = folder / f"secret-{secrets.token_hex(8)}"
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w") as file:
                file.write(secrets.token_hex(32))
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
            draft.unlink()
        return _read(path) or b""
    return b""


def _line(message: BaseModel) -> bytes:
    return message.model_dump_json().encode() + b"\n"
