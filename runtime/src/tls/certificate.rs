//! Certificates, keys and authorities in PEM files. An error names the setting, the file and the mistake.

use std::{fs, path::Path, sync::Arc};

use rustls::{
    InconsistentKeys, RootCertStore,
    pki_types::{CertificateDer, PrivateKeyDer, pem, pem::PemObject},
    sign::{CertifiedKey, SingleCertAndKey},
};

use super::{expiry, provider};
use crate::Error;

/// A file and the setting that names it.
#[derive(Clone, Copy)]
pub(super) struct File<'a> {
    pub field: &'static str,
    pub path: &'a Path,
}

impl File<'_> {
    fn wrong(self, mistake: impl std::fmt::Display) -> Error {
        Error::invalid(self.field, format!("{}: {mistake}", self.path.display()))
    }

    fn bytes(self) -> Result<Vec<u8>, Error> {
        fs::read(self.path).map_err(|e| self.wrong(format!("cannot be read: {e}")))
    }

    /// All certificates of the file, at least one.
    fn certificates(self) -> Result<Vec<CertificateDer<'static>>, Error> {
        let bytes = self.bytes()?;
        let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
        let certificates = read.map_err(|e| self.wrong(format!("is not PEM: {e}")))?;
        if certificates.is_empty() {
            return Err(self.wrong("has no certificate in PEM form"));
        }
        Ok(certificates)
    }

    fn private_key(self) -> Result<PrivateKeyDer<'static>, Error> {
        PrivateKeyDer::from_pem_slice(&self.bytes()?).map_err(|e| match e {
            pem::Error::NoItemsFound => self.wrong("has no private key in PEM form"),
            e => self.wrong(format!("is not PEM: {e}")),
        })
    }
}

/// A certificate chain with its private key.
pub(super) struct Identity {
    /// The chain and the key in the form that rustls uses.
    pub resolver: Arc<SingleCertAndKey>,
    /// Unix time in seconds after which the first certificate of the chain expires.
    pub not_after: Option<i64>,
}

/// Reads a certificate chain with its private key.
pub(super) fn identity(cert: File, key: File) -> Result<Identity, Error> {
    let (chain, private) = (cert.certificates()?, key.private_key()?);
    let not_after = chain.iter().filter_map(|certificate| expiry::not_after(certificate)).min();
    let certified = CertifiedKey::from_der(chain, private, &provider()).map_err(|e| match e {
        rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
            key.wrong(format!("is not the key of {}", cert.path.display()))
        }
        rustls::Error::InvalidCertificate(e) => cert.wrong(format!("cannot be used: {e}")),
        e => key.wrong(format!("cannot be used with {}: {e}", cert.path.display())),
    })?;
    Ok(Identity { resolver: Arc::new(certified.into()), not_after })
}

/// Reads the certificates of authorities.
pub(super) fn authorities(ca: File) -> Result<Arc<RootCertStore>, Error> {
    let mut roots = RootCertStore::empty();
    for (number, certificate) in (1..).zip(ca.certificates()?) {
        roots.add(certificate).map_err(|e| ca.wrong(format!("certificate {number} cannot be used: {e}")))?;
    }
    Ok(Arc::new(roots))
}
