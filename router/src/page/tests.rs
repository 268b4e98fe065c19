use axum::body::{Body, to_bytes};
use axum::http::Request;
use tower::ServiceExt;

use super::*;

async fn fetch(path: &str, if_none_match: Option<&str>) -> (StatusCode, HeaderMap, Vec<u8>) {
    let mut request = Request::get(path);
    if let Some(tags) = if_none_match {
        request = request.header(header::IF_NONE_MATCH, tags);
    }
    let response = routes().oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
    let (parts, body) = response.into_parts();
    (parts.status, parts.headers, to_bytes(body, usize::MAX).await.unwrap().to_vec())
}

#[tokio::test]
async fn a_file_is_sent_once_and_then_found_unchanged() {
    for file in FILES {
        let (status, headers, body) = fetch(file.path, None).await;
        assert_eq!(status, StatusCode::OK, "{}", file.path);
        assert_eq!(body, file.bytes);
        let etag = headers[header::ETAG].to_str().unwrap();
        for tags in [etag.to_owned(), format!("W/{etag}"), format!("\"other\", {etag}"), "*".into()] {
            let (status, again, body) = fetch(file.path, Some(&tags)).await;
            assert_eq!((status, body.len()), (StatusCode::NOT_MODIFIED, 0), "{tags}");
            assert_eq!(again[header::ETAG], etag);
        }
        let (status, ..) = fetch(file.path, Some("\"other\"")).await;
        assert_eq!(status, StatusCode::OK);
    }
}

/// Every file that the page links to is one of the served files. A link to any other file breaks the page.
#[test]
fn the_page_names_only_files_that_are_served() {
    let mut named = 0;
    for file in FILES {
        let text = std::str::from_utf8(file.bytes).unwrap();
        for line in text.lines() {
            let link =
                ["src=\"", "href=\"", "from \"", "import \""].iter().find_map(|word| line.split_once(word));
            let Some((target, _)) = link.and_then(|(_, rest)| rest.split_once('"')) else { continue };
            if target.starts_with('#') || target == "/" {
                continue;
            }
            let path = target.replacen("./", "/page/", 1);
            assert!(FILES.iter().any(|file| file.path == path), "{} names {target}", file.path);
            named += 1;
        }
        assert!(!text.contains("style=\"") && !text.contains("innerHTML"), "{} breaks the policy", file.path);
    }
    assert!(named >= FILES.len(), "only {named} links were found");
}
