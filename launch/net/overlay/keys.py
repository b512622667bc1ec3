"""The key of a run: a private key and its certificate in one file, the same on all machines.

Or one file per machine (`add`), signed with the run's key: then a machine cannot use the name of
another, and one that is lost does not give the run's key away.
"""

import datetime
import errno
import os
import re
import ssl
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinpipe.launch.host.packages import explain
from thinpipe.launch.net.overlay.links.handshake import RUN_NAME

_BEGIN = "-----BEGIN CERTIFICATE-----"
_CLOCK_TOLERANCE = datetime.timedelta(days=2)
DAYS = 365  # `thinpipe doctor` warns two weeks before the end
NEW_KEY = "thinpipe key new run.key"
_OTHERS = 0o077  # permissions of group and others
_ELSEWHERE = (
    "this file system does not keep modes: keep the key on one that does, such as your home "
    "folder, and name it with network.key_file or THINPIPE_KEY_FILE"
)


@dataclass(frozen=True)
class KeyInfo:
    """`name` is the machine's; None for a key that all machines share."""

    name: str | None
    not_before: datetime.datetime
    not_after: datetime.datetime


def new(path: Path, *, days: int = DAYS) -> None:
    """Write a run's key, readable by this user only."""
    _write(path, _certificate(RUN_NAME, days, None))


def add(run_key: Path, name: str, path: Path, *, days: int = DAYS) -> None:
    """Write a key for one machine, signed with the run's key.

    Raises:
        ValueError: the file exists, the name is no name, or `run_key` is not a run's key.
    """
    if not re.fullmatch(r"[\w.-]{1,63}", name) or name == RUN_NAME:
        raise ValueError(f"{name!r}: use letters, digits, and . _ - in a machine's name")
    if read(run_key).name is not None:
        raise ValueError(f"{run_key}: the key of one machine; sign with the run's key")
    text = run_key.read_text(encoding="utf-8")
    _write(path, _certificate(name, days, run_key) + text[text.index(_BEGIN) :].encode())


def read(path: Path) -> KeyInfo:
    """The content of a key file; ValueError if it is missing, readable by others, or not a key."""
    _check_file(path)
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificates(path.read_bytes())
    except ValueError:
        raise ValueError(f"{path}: not a key of ThinPipe's; make one with `{NEW_KEY}`") from None
    name = found[0].subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)[0].value
    own = None if name == RUN_NAME else str(name)
    return KeyInfo(own, found[0].not_valid_before_utc, found[0].not_valid_after_utc)


def contexts(path: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """(for accepting, for connecting): TLS 1.3 only, both with this run's key. Errors of `read`."""
    _check_file(path)
    # the last certificate is the run's, also in the key of a machine
    authority = _BEGIN + path.read_text(encoding="utf-8").rpartition(_BEGIN)[2]
    found = []
    for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # a machine is known by its key, wherever it is
        context.verify_mode = ssl.CERT_REQUIRED
        context.set_ecdh_curve("X25519")  # others cost the side that is asked up to 400 times more
        try:
            context.load_cert_chain(path)
            context.load_verify_locations(cadata=authority)
        except (ssl.SSLError, ValueError) as error:
            raise ValueError(
                f"{path}: not a key of ThinPipe's ({error}); make one with `{NEW_KEY}`"
            ) from None
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0  # what the connecting side would have to read
        found.append(context)
    return found[0], found[1]


def check_clock(context: ssl.SSLContext, path: Path, machine: str) -> None:
    """Reject a key that is not valid by this host's clock, by a ValueError with both dates."""
    now_s = time.time()
    (key,) = context.get_ca_certs()
    first_s, last_s = (ssl.cert_time_to_seconds(str(key[end])) for end in ("notBefore", "notAfter"))
    if not first_s <= now_s <= last_s:
        first, last, now = (f"{datetime.date.fromtimestamp(s)}" for s in (first_s, last_s, now_s))
        raise ValueError(
            f"network.key_file = {path}: valid from {first} to {last}, and the clock "
            f"of {machine} says {now}; correct the clock (timedatectl set-ntp true) or, if "
            "it is right, make a new key (thinpipe key new) and copy it to all machines"
        )


def _check_file(path: Path) -> None:
    if not path.is_file():
        missing = "a folder" if path.is_dir() else "no such file"
        raise ValueError(
            f"network.key_file = {str(path)!r}: {missing}, seen from {Path.cwd()}; copy it from "
            f"the machine where it was made, or make one with `{NEW_KEY}` and copy it to every "
            "machine of the run"
        )
    if path.stat().st_mode & _OTHERS:
        remedy = f"chmod 600 {path}" if _has_modes(path.parent) else _ELSEWHERE
        raise ValueError(
            f"network.key_file = {str(path)!r}: other users of this machine can read it; {remedy}"
        )


def _has_modes(folder: Path) -> bool:
    """Whether a file there can be private: vfat and the mounts of Windows' disks have no modes.

    Where no file can be made it is taken to be so.
    """
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            return not os.fstat(file.fileno()).st_mode & _OTHERS
    except OSError:
        return True


def _certificate(name: str, days: int, signer: Path | None) -> bytes:
    """A private key and its certificate."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    signing: Any = key
    if signer is not None:
        issuer = x509.load_pem_x509_certificate(signer.read_bytes()).subject
        signing = serialization.load_pem_private_key(signer.read_bytes(), None)
    now, signs = datetime.datetime.now(datetime.UTC), signer is None
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_TOLERANCE)
        .not_valid_after(now + datetime.timedelta(days=days))
        # the key of a machine signs no others
        .add_extension(x509.BasicConstraints(ca=signs, path_length=0 if signs else None), True)
        .sign(signing, hashes.SHA256())
    )
    encoding, private = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    text = key.private_bytes(encoding, private, serialization.NoEncryption())
    return text + certificate.public_bytes(encoding)


def _write(path: Path, content: bytes) -> None:
    try:
        # private from the start: a chmod comes too late
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ValueError(f"{path}: exists; a key is never overwritten, use another name") from None
    except OSError as error:
        raise ValueError(explain(error)) from None
    shared = os.fstat(descriptor).st_mode & _OTHERS  # vfat ignores the mode
    try:
        with os.fdopen(descriptor, "wb") as file:
            if shared:
                raise OSError(
                    errno.EPERM, f"other users of this machine could read it; {_ELSEWHERE}"
                )
            file.write(content)
    except OSError as error:  # leave no partial key
        path.unlink()
        raise ValueError(f"{path}: not written: {error.strerror}") from None
