use super::*;

#[tokio::test]
async fn a_request_s_timeout_ends_any_wait() {
    let waits = std::future::pending::<Result<(), Error>>();
    let error = within(Some(Duration::from_millis(1)), waits).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    assert_eq!(error.message(), "the request was not accepted within 1 ms");
    assert_eq!(within(None, async { Ok(7) }).await, Ok(7));
}
