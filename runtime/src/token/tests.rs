use super::*;

#[test]
fn only_the_same_secret_is_found_in_a_call() {
    let token = Token::new("join_token_file", "open sesame").unwrap();
    let mut headers = HeaderMap::new();
    assert!(!token.is_in(&headers) && shown(&headers).is_none());
    token.add_to(&mut headers);
    assert!(token.is_in(&headers));
    for other in ["", "open", "open sesame!", "Open sesame", "open sesamf"] {
        assert!(!Token::new("x", other).unwrap().is_in(&headers), "{other:?}");
    }
    headers.insert(AUTHORIZATION, HeaderValue::from_static("Basic open sesame"));
    assert!(!token.is_in(&headers));
}

#[test]
fn a_file_without_a_secret_is_refused_and_no_secret_is_printed() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("token");
    for text in ["", " \n", "two\nlines"] {
        fs::write(&file, text).unwrap();
        assert_eq!(Token::read("cluster_token_file", &file).unwrap_err().field(), Some("cluster_token_file"));
    }
    fs::write(&file, " open sesame\n").unwrap();
    let token = Token::read("cluster_token_file", &file).unwrap();
    let mut headers = HeaderMap::new();
    token.add_to(&mut headers);
    assert!(token.is_in(&headers));
    assert!(!format!("{token:?} {headers:?}").contains("sesame"));
}
