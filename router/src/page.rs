//! The web page at `/`: a chat, and a live view of the cluster. Its files are embedded in the executable.
//!
//! These files need no API key, because they contain no data. The routes from which the page reads its data check the
//! key.

use axum::{
    Router,
    body::Bytes,
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use ring::digest::{SHA256, digest};

/// The page loads files and data only from its own origin, runs no inline code, and is shown in no frame. Pictures and
/// recordings that it shows before it sends them have URLs of the scheme `blob:`, which only its own code makes.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
    img-src 'self' blob:; media-src blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; \
    frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'";
/// A browser may cache the files, but must revalidate them before each use.
const CACHE_CONTROL: &str = "no-cache";

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";

/// One file of the page.
struct File {
    path: &'static str,
    content_type: &'static str,
    bytes: &'static [u8],
}

/// Declares a file below `page/`.
macro_rules! file {
    ($path:literal, $name:literal, $content_type:expr) => {
        File { path: $path, content_type: $content_type, bytes: include_bytes!(concat!("../page/", $name)) }
    };
}

const FILES: &[File] = &[
    file!("/", "index.html", HTML),
    file!("/page/style.css", "style.css", CSS),
    file!("/page/chat.css", "chat.css", CSS),
    file!("/page/cluster.css", "cluster.css", CSS),
    file!("/page/icon.svg", "icon.svg", SVG),
    file!("/page/main.js", "main.js", SCRIPT),
    file!("/page/api.js", "api.js", SCRIPT),
    file!("/page/elements.js", "elements.js", SCRIPT),
    file!("/page/copy.js", "copy.js", SCRIPT),
    file!("/page/chat.js", "chat.js", SCRIPT),
    file!("/page/attachments.js", "attachments.js", SCRIPT),
    file!("/page/welcome.js", "welcome.js", SCRIPT),
    file!("/page/reply.js", "reply.js", SCRIPT),
    file!("/page/markdown.js", "markdown.js", SCRIPT),
    file!("/page/inline.js", "inline.js", SCRIPT),
    file!("/page/parameters.js", "parameters.js", SCRIPT),
    file!("/page/cluster.js", "cluster.js", SCRIPT),
    file!("/page/rates.js", "rates.js", SCRIPT),
    file!("/page/chart.js", "chart.js", SCRIPT),
    file!("/page/percentile.js", "percentile.js", SCRIPT),
    file!("/page/workers.js", "workers.js", SCRIPT),
    file!("/page/steps.js", "steps.js", SCRIPT),
    file!("/page/requests.js", "requests.js", SCRIPT),
    file!("/page/request.js", "request.js", SCRIPT),
    file!("/page/waterfall.js", "waterfall.js", SCRIPT),
];

/// The routes of the page's files.
pub fn routes() -> Router {
    FILES.iter().fold(Router::new(), |router, file| {
        let etag = etag(file.bytes);
        router
            .route(file.path, get(move |headers: HeaderMap| std::future::ready(file.answer(&etag, &headers))))
    })
}

/// A strong entity tag: the same for the same bytes in every process and build.
fn etag(bytes: &[u8]) -> String {
    let hash = digest(&SHA256, bytes);
    let hex: String = hash.as_ref()[..16].iter().map(|byte| format!("{byte:02x}")).collect();
    format!("\"{hex}\"")
}

impl File {
    fn answer(&self, etag: &str, request: &HeaderMap) -> Response {
        let header_value = |text: &str| HeaderValue::from_str(text).unwrap_or(HeaderValue::from_static(""));
        let headers = [
            (header::ETAG, header_value(etag)),
            (header::CACHE_CONTROL, HeaderValue::from_static(CACHE_CONTROL)),
            (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(CONTENT_SECURITY_POLICY)),
            (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
            (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
            (HeaderName::from_static("cross-origin-opener-policy"), HeaderValue::from_static("same-origin")),
        ];
        if is_known(etag, request) {
            return (StatusCode::NOT_MODIFIED, headers).into_response();
        }
        let content_type = [(header::CONTENT_TYPE, HeaderValue::from_static(self.content_type))];
        (headers, content_type, Bytes::from_static(self.bytes)).into_response()
    }
}

/// True if `If-None-Match` names the entity tag. The comparison is weak (RFC 9110, 13.1.2), because a proxy that
/// compresses a file marks its tag as weak.
fn is_known(etag: &str, request: &HeaderMap) -> bool {
    let given = request.get_all(header::IF_NONE_MATCH).iter().filter_map(|value| value.to_str().ok());
    let mut tags = given.flat_map(|value| value.split(',')).map(str::trim);
    tags.any(|tag| tag == "*" || tag.strip_prefix("W/").unwrap_or(tag) == etag)
}

#[cfg(test)]
mod tests;
