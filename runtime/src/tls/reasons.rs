//! The reasons for which a handshake fails, as text. Each text is about the peer: "it …" or "its …".

use std::io;

use rustls::{AlertDescription, CertificateError, Error, InvalidMessage};

/// The reason for which a TLS stream failed.
pub(super) fn of(error: &io::Error) -> String {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>());
    match (inner, error.kind()) {
        (Some(inner), _) => of_tls(inner),
        (None, io::ErrorKind::UnexpectedEof) => "it closed the connection during the handshake".into(),
        (None, _) => format!("the connection broke during the handshake: {error}"),
    }
}

fn of_tls(error: &Error) -> String {
    match error {
        Error::NoCertificatesPresented => "it shows no certificate".into(),
        Error::InvalidCertificate(error) => of_certificate(error),
        Error::AlertReceived(alert) => of_alert(*alert),
        Error::InvalidMessage(InvalidMessage::InvalidContentType) => "it does not speak TLS".into(),
        Error::NoApplicationProtocol => "it speaks none of this port's protocols".into(),
        other => other.to_string(),
    }
}

fn of_certificate(error: &CertificateError) -> String {
    match error {
        // A signature is bad if an untrusted authority has the name of a trusted one.
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            "its certificate is of an authority that is not trusted here".into()
        }
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            "its certificate has expired".into()
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "its certificate is not valid yet".into()
        }
        CertificateError::NotValidForName => "its certificate is for another name".into(),
        CertificateError::NotValidForNameContext { expected, presented } => {
            format!("its certificate is for {}, not for {}", presented.join(", "), expected.to_str())
        }
        other => format!("its certificate is not valid: {other}"),
    }
}

fn of_alert(alert: AlertDescription) -> String {
    let why = match alert {
        AlertDescription::UnknownCA | AlertDescription::DecryptError => {
            "it is of an authority that is not trusted there"
        }
        AlertDescription::CertificateExpired => "it has expired, or is not valid yet",
        AlertDescription::CertificateRequired => "none was shown",
        AlertDescription::BadCertificate => "it is for another name, or malformed",
        other => return format!("it ended the handshake with the alert {other:?}"),
    };
    format!("it refuses this process's certificate: {why}")
}
