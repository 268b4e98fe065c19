use super::*;

fn at(http: [u8; 4], prompt: Option<Prompt>) -> Announcement {
    Announcement { http: (http, 8000).into(), grpc: (http, 50051).into(), prompt, is_encrypted: false }
}

#[test]
fn the_command_names_a_reachable_address_and_a_prompt_that_the_process_takes() {
    assert_eq!(
        at([127, 0, 0, 1], Some(Prompt::Text)).command().unwrap(),
        "curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \
         -d '{\"prompt\": \"The capital of France is\", \"max_tokens\": 16}'"
    );
    let everywhere = at([0, 0, 0, 0], Some(Prompt::TokenIds)).command().unwrap();
    assert!(
        everywhere.contains("http://127.0.0.1:8000/") && everywhere.contains("[1, 2, 3]"),
        "{everywhere}"
    );
    assert_eq!(at([127, 0, 0, 1], None).command(), None);
    let encrypted = Announcement { is_encrypted: true, ..at([127, 0, 0, 1], Some(Prompt::Text)) };
    assert!(encrypted.command().unwrap().contains(" https://127.0.0.1:8000/"));
}

#[tokio::test]
async fn it_waits_for_readiness() {
    let health = Health::default();
    let announced = tokio::spawn(at([127, 0, 0, 1], None).when_ready(health.clone()));
    tokio::task::yield_now().await;
    assert!(!announced.is_finished());
    health.set_ready(State::Ok);
    announced.await.unwrap();
}
