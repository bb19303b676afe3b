"""TLS: PEM files to credentials."""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc

from astraflow.core.errors import AstraflowError, Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """PEM files; all unset: plain text, which suits loopback only.

    Attributes:
        certificate: Shown to the peer, with its chain. A server needs one.
        key: Private key of the certificate.
        ca: Whom to trust. On a server: callers must show a certificate of it.
    """

    certificate: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    @classmethod
    def of(cls, files: Mapping[str, str | Path | None]) -> "Tls":
        """Return what a recipe or a hub's endpoint says, by the names of the attributes.

        Raises:
            AstraflowError: INVALID_FIELD for a certificate without its key.
        """
        return cls(**{name: Path(file) for name, file in files.items() if file is not None})

    def __post_init__(self) -> None:
        if (self.certificate is None) is not (self.key is None):
            raise AstraflowError(
                Reason.INVALID_FIELD,
                "TLS needs certificate and key together, or neither",
                metadata={"field": "tls"},
            )

    @property
    def is_plain(self) -> bool:
        """Whether nothing is encrypted."""
        return self.certificate is None and self.ca is None


def channel_credentials(tls: Tls) -> grpc.ChannelCredentials:
    """Return what a caller dials with.

    Raises:
        AstraflowError: INVALID_FIELD for a file that cannot be read.
    """
    return grpc.ssl_channel_credentials(
        root_certificates=_read(tls.ca, "ca"),
        private_key=_read(tls.key, "key"),
        certificate_chain=_read(tls.certificate, "certificate"),
    )


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Return what a server answers with.

    Raises:
        AstraflowError: INVALID_FIELD without a certificate, or for a file that cannot be read.
    """
    key, certificate = _read(tls.key, "key"), _read(tls.certificate, "certificate")
    if key is None or certificate is None:
        raise _no_certificate()
    return grpc.ssl_server_credentials(
        [(key, certificate)],
        root_certificates=_read(tls.ca, "ca"),
        require_client_auth=tls.ca is not None,
    )


def server_context(tls: Tls) -> ssl.SSLContext:
    """Return what a server of HTTP answers with.

    Raises:
        AstraflowError: INVALID_FIELD without a certificate, or for a file that is none.
    """
    if tls.certificate is None or tls.key is None:
        raise _no_certificate()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(tls.certificate, tls.key)
        if tls.ca is not None:
            context.load_verify_locations(tls.ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"tls: {tls.certificate}, {tls.key} or {tls.ca} cannot be used: {error}",
            metadata={"field": "tls"},
        ) from error
    return context


def _no_certificate() -> AstraflowError:
    return AstraflowError(
        Reason.INVALID_FIELD,
        "a server with TLS needs a certificate and its key",
        metadata={"field": "tls.certificate"},
    )


def _read(path: Path | None, field: str) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"tls.{field}: {path} cannot be read: {error.strerror}",
            metadata={"field": f"tls.{field}"},
        ) from error
