"""Certificates of servers, and of the authority that signs them. Imported where some are made: the library takes 0.1 s."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fluster_bus.access.tls import is_address
from fluster_bus.core.errors import CredentialsError, InvalidNameError

LIFE = timedelta(days=365)
AUTHORITY_LIFE = timedelta(days=3_650)
# Certificates begin a little before they are made: clocks of other machines may be behind.
_CLOCKS = timedelta(hours=1)
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9])?"
_HOST = re.compile(rf"(?=.{{1,253}}\Z)(?:\*\.)?{_LABEL}(?:\.{_LABEL})*")
_MAX_COMMON_NAME = 64
_USES_OF_AUTHORITIES = {"key_cert_sign", "crl_sign"}
_USES_OF_SERVERS = {"digital_signature"}
_USES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)


def checked_host(host: str) -> str:
    """A name or IP address that a certificate can be for. Raises InvalidNameError."""
    bare = host.strip().strip("[]")
    if is_address(bare):
        return str(ipaddress.ip_address(bare))
    if _HOST.fullmatch(bare) is None:
        raise InvalidNameError(f"{host!r} is not a host: give a name such as bus.example.org, or an IP address")
    return bare


@dataclass(frozen=True)
class Certificate:
    """One with its private key, both as PEM. Its text and `repr` show no key."""

    pem: str
    key: str

    def __repr__(self) -> str:
        return f"Certificate({self.info.subject})"

    @property
    def info(self) -> CertificateInfo:
        return read_certificate(self.pem)

    @classmethod
    def of_file(cls, text: str, where: str) -> Certificate:
        """Both, as `to_file` wrote them. Raises CredentialsError, which shows no key."""
        try:
            key = serialization.load_pem_private_key(text.encode(), None)
            certificate = x509.load_pem_x509_certificates(text.encode())[0]
        except (ValueError, TypeError, IndexError) as error:
            raise CredentialsError(f"the file {where} is damaged: restore it from a backup") from error
        if key.public_key() != certificate.public_key():
            raise CredentialsError(f"the file {where} holds a key of another certificate: restore it from a backup")
        return cls(_pem(certificate), _key_pem(key))

    def to_file(self) -> str:
        """Both in one text: a server never reads the key of one certificate with another."""
        return self.key + self.pem


@dataclass(frozen=True)
class CertificateInfo:
    """What a certificate says."""

    subject: str
    hosts: tuple[str, ...]
    since: datetime
    until: datetime

    def state(self, now: datetime) -> str:
        if now < self.since:
            return "not valid yet"
        return "good" if now < self.until else "expired"


def read_certificate(pem: str) -> CertificateInfo:
    """What the first certificate in `pem` says. Raises ValueError."""
    certificate = x509.load_pem_x509_certificates(pem.encode())[0]
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        hosts = (*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress)))
    except x509.ExtensionNotFound:
        hosts = ()
    subject = certificate.subject.rfc4514_string()
    return CertificateInfo(subject, hosts, certificate.not_valid_before_utc, certificate.not_valid_after_utc)


def new_authority(now: datetime, life: timedelta = AUTHORITY_LIFE) -> Certificate:
    """An authority that signs certificates of servers itself, and none of other authorities."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"fluster authority {now.astimezone(UTC):%Y-%m-%d %H:%M:%S}")  # it distinguishes two of them
    built = (
        _begun(name, name, key, now, now + life)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(_USES_OF_AUTHORITIES), critical=True)
    )
    return Certificate(_pem(built.sign(key, hashes.SHA256())), _key_pem(key))


def new_server(
    authority: Certificate, name: str, hosts: Sequence[str], now: datetime, life: timedelta = LIFE
) -> Certificate:
    """A certificate for a server at `hosts`, which it shows to clients, and to other servers that it connects to.

    It ends with the authority at the latest. Raises InvalidNameError.
    """
    signed_by = x509.load_pem_x509_certificate(authority.pem.encode())
    signer = serialization.load_pem_private_key(authority.key.encode(), None)
    if not isinstance(signer, ec.EllipticCurvePrivateKey):
        raise CredentialsError("the key of the authority of certificates is of another kind: restore it from a backup")
    key = ec.generate_private_key(ec.SECP256R1())
    known = [checked_host(each) for each in hosts]
    names = [x509.IPAddress(ipaddress.ip_address(each)) if is_address(each) else x509.DNSName(each) for each in known]
    until = min(now + life, signed_by.not_valid_after_utc)
    built = (
        _begun(_name(name), signed_by.subject, key, now, until)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(_USES_OF_SERVERS), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(
                signed_by.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
            ),
            critical=False,
        )
    )
    return Certificate(_pem(built.sign(signer, hashes.SHA256())), _key_pem(key))


def _begun(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, until: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, until) - _CLOCKS)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:_MAX_COMMON_NAME])])


def _usage(wanted: set[str]) -> x509.KeyUsage:
    return x509.KeyUsage(**{each: each in wanted for each in _USES})


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode("ascii")


def _key_pem(key: object) -> str:
    assert isinstance(key, ec.EllipticCurvePrivateKey)  # noqa: S101 - all keys made here are
    data = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return data.decode("ascii")
