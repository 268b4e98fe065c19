//! The names in certificates of a cluster's processes.
//!
//! A certificate names the role of its process and not its host, because addresses of workers change. The name is a DNS
//! name in the subject alternative names: `conductor.tutti.internal`, `worker.tutti.internal` or
//! `router.tutti.internal`. A certificate may have several of these names. A router's certificate therefore does not
//! let its holder join as a worker. `internal` is reserved for private use (ICANN resolution 2024.07.29.06).

use std::sync::Arc;

use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, RootCertStore, SignatureScheme,
    client::{
        WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
        verify_server_name,
    },
    pki_types::{CertificateDer, ServerName, UnixTime},
    server::{
        ParsedCertificate, VerifierBuilderError, WebPkiClientVerifier,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
};

use super::provider;

/// A kind of process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// A conductor. Workers that it starts use its certificate.
    Conductor,
    /// A worker.
    Worker,
    /// A router, or an operator who calls `tutti.cluster.v1.Conductor`.
    Router,
}

impl Role {
    /// The DNS name of the role.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Conductor => "conductor.tutti.internal",
            Self::Worker => "worker.tutti.internal",
            Self::Router => "router.tutti.internal",
        }
    }

    /// The role as a name in certificates.
    pub(super) fn server_name(self) -> Result<ServerName<'static>, Error> {
        ServerName::try_from(self.name()).map_err(|e| Error::General(e.to_string()))
    }

    /// The roles whose names the certificate of a process in this role may have, its own role first.
    fn accepted(self) -> &'static [Self] {
        match self {
            Self::Conductor => &[Self::Conductor],
            Self::Worker => &[Self::Worker, Self::Conductor],
            Self::Router => &[Self::Router],
        }
    }

    /// Calls `verify` with each accepted name until one succeeds. If all fail, returns the error of the role's own
    /// name.
    fn verify_any<T>(self, verify: impl Fn(&ServerName<'_>) -> Result<T, Error>) -> Result<T, Error> {
        let mut refused = Error::InvalidCertificate(CertificateError::NotValidForName);
        for role in self.accepted().iter().rev() {
            match verify(&role.server_name()?) {
                Ok(verified) => return Ok(verified),
                Err(error) => refused = error,
            }
        }
        Err(refused)
    }
}

/// Verifies the certificate of a peer in one role: its authority, its validity period and its name.
#[derive(Debug)]
pub(super) struct RoleVerifier<V: ?Sized> {
    role: Role,
    chain: Arc<V>,
}

/// A verifier of servers.
pub(super) fn servers(
    role: Role,
    roots: Arc<RootCertStore>,
) -> Result<Arc<dyn ServerCertVerifier>, VerifierBuilderError> {
    let chain = WebPkiServerVerifier::builder_with_provider(roots, provider()).build()?;
    Ok(Arc::new(RoleVerifier { role, chain }))
}

/// A verifier of clients, which must show a certificate.
pub(super) fn clients(
    role: Role,
    roots: Arc<RootCertStore>,
) -> Result<Arc<dyn ClientCertVerifier>, VerifierBuilderError> {
    let chain = WebPkiClientVerifier::builder_with_provider(roots, provider()).build()?;
    Ok(Arc::new(RoleVerifier { role, chain }))
}

/// Implements the trait methods that verify signatures. They do not depend on the role.
macro_rules! signatures_of_the_chain {
    () => {
        fn verify_tls12_signature(
            &self,
            message: &[u8],
            cert: &CertificateDer<'_>,
            dss: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            self.chain.verify_tls12_signature(message, cert, dss)
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            cert: &CertificateDer<'_>,
            dss: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            self.chain.verify_tls13_signature(message, cert, dss)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            self.chain.supported_verify_schemes()
        }
    };
}

impl ServerCertVerifier for RoleVerifier<WebPkiServerVerifier> {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.role.verify_any(|name| {
            self.chain.verify_server_cert(end_entity, intermediates, name, ocsp_response, now)
        })
    }

    signatures_of_the_chain!();
}

impl ClientCertVerifier for RoleVerifier<dyn ClientCertVerifier> {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.chain.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.chain.verify_client_cert(end_entity, intermediates, now)?;
        let certificate = ParsedCertificate::try_from(end_entity)?;
        self.role.verify_any(|name| verify_server_name(&certificate, name))?;
        Ok(verified)
    }

    signatures_of_the_chain!();
}
