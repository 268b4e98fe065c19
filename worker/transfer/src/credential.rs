//! Credentials of calls between workers. A credential is in the metadata of a call, and is checked before a message of
//! the call is read.

use std::sync::Arc;

use tonic::{Request, Status, codegen::http::HeaderMap, metadata::MetadataValue, service::Interceptor};
use tutti_proto::GraphKey;
use tutti_runtime::{serve::Standing, token::Token};

use crate::{ranks::Ranks, receive::Reservations};

/// Name of the metadata entry of a push that identifies the receiving graph.
const GRAPH: &str = "tutti-graph";

/// A check of a call's metadata.
pub(crate) trait Check: Interceptor + Clone + Send + Sync + 'static {}

impl<C: Interceptor + Clone + Send + Sync + 'static> Check for C {}

/// A call that shows a secret.
pub(crate) fn call<T>(message: T, secret: &[u8]) -> Request<T> {
    let mut request = Request::new(message);
    Token::of_bytes(secret).add_to(request.metadata_mut().as_mut());
    request
}

/// A push that shows the secret of the graph's reservation.
pub(crate) fn push<T>(message: T, key: GraphKey, secret: &[u8]) -> Request<T> {
    let mut request = call(message, secret);
    // The conversion succeeds, because a key has only digits and dots, which are valid in metadata.
    if let Ok(text) = MetadataValue::try_from(key.to_string()) {
        request.metadata_mut().insert(GRAPH, text);
    }
    request
}

/// True if a call shows this secret. Takes constant time.
pub(crate) fn is_shown(headers: &HeaderMap, secret: &[u8]) -> bool {
    Token::of_bytes(secret).is_in(headers)
}

/// Accepts only pushes that show the secret of their reservation. The service finds the graph's key in the request's
/// extensions.
pub(crate) fn check_push(reservations: Arc<Reservations>) -> impl Check {
    move |mut request: Request<()>| {
        let key = request.metadata().get(GRAPH).and_then(|text| GraphKey::parse(text.to_str().ok()?));
        let key = key.ok_or_else(|| Status::invalid_argument("the metadata names no graph"))?;
        reservations.check(key, request.metadata().as_ref())?;
        Standing::vouch(request.extensions());
        request.extensions_mut().insert(key);
        Ok(request)
    }
}

/// Accepts only reports that show the secret of the group.
pub(crate) fn check_report(ranks: Arc<Ranks>) -> impl Check {
    move |request: Request<()>| {
        if !ranks.is_shown(request.metadata().as_ref()) {
            return Err(Status::unauthenticated("this is not the secret of the group"));
        }
        Standing::vouch(request.extensions());
        Ok(request)
    }
}
