//! The id of a request: taken or made, given back with every answer, and passed on.

use axum::{
    body::Body,
    http::{Request, StatusCode},
};
use serde_json::json;
use tonic::{Code, Request as Call, Status};
use tutti_proto::v1::{GenerateRequest, GetModelRequest, inference_client::InferenceClient};
use tutti_runtime::{Error, request_id::XRequestId};

use crate::{
    grpc::text,
    support::{Setup, Step, connect, post, ready, tokens},
};

const COMPLETIONS: &str = "/v1/completions";

fn named(id: &str, body: &serde_json::Value) -> Request<Body> {
    let mut request = post(COMPLETIONS, body.to_string());
    request.headers_mut().insert(XRequestId::HEADER, id.parse().unwrap());
    request
}

fn is_new(id: &str) -> bool {
    id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[tokio::test]
async fn an_answer_has_the_client_s_id_or_a_new_one_and_conductors_get_it() {
    let setup = ready().await;
    let id_of =
        |answer: &crate::support::Answer| answer.headers[XRequestId::HEADER].to_str().unwrap().to_owned();
    let body = json!({ "prompt": "hello" });
    assert_eq!(id_of(&setup.send(named("client-1", &body)).await), "client-1");
    assert_eq!(setup.conductor.last().request_id, "client-1");
    let invalid = id_of(&setup.send(named("two words", &body)).await);
    let none = id_of(&setup.post(COMPLETIONS, &body).await);
    assert!(is_new(&invalid) && is_new(&none) && invalid != none);
    assert_eq!(setup.conductor.last().request_id, none);
    let refused = setup.send(named("client-2", &json!({ "prompt": 1 }))).await;
    assert_eq!((refused.status, id_of(&refused)), (StatusCode::BAD_REQUEST, "client-2".into()));
    assert_eq!(refused.json()["error"]["request_id"], "client-2");
    // The page and routes that do not exist have it, too.
    for path in ["/", "/nowhere"] {
        let answer = setup.send(Request::get(path).body(Body::empty()).unwrap()).await;
        assert!(is_new(&id_of(&answer)), "{path}");
    }
}

#[tokio::test]
async fn the_error_that_ends_a_stream_has_the_id() {
    let setup = ready().await;
    setup.conductor.play(|_| vec![tokens(0, &[97]), Step::Fail(Error::internal("broken").into())]);
    let answer = setup.send(named("client-3", &json!({ "prompt": "hello", "stream": true }))).await;
    assert_eq!(answer.status, StatusCode::OK);
    assert_eq!(answer.events().last().unwrap()["error"]["request_id"], "client-3");
}

#[tokio::test]
async fn calls_over_grpc_have_it_as_metadata() {
    let setup = ready().await;
    let mut client = client(&setup);
    let mut call = Call::new(text("hello"));
    call.metadata_mut().insert("x-request-id", "client-4".parse().unwrap());
    let answer = client.generate(call).await.unwrap();
    assert_eq!(answer.metadata().get("x-request-id").unwrap(), "client-4");
    assert_eq!(setup.conductor.last().request_id, "client-4");
    let model = client.get_model(GetModelRequest {}).await.unwrap();
    assert!(is_new(model.metadata().get("x-request-id").unwrap().to_str().unwrap()));
    let mut call = Call::new(GenerateRequest::default());
    call.metadata_mut().insert("x-request-id", "client-5".parse().unwrap());
    let refused: Status = client.generate(call).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    assert_eq!(refused.metadata().get("x-request-id").unwrap(), "client-5");
}

fn client(setup: &Setup) -> InferenceClient<tonic::transport::Channel> {
    InferenceClient::new(connect(setup.front_door.grpc_routes(&setup.health).unwrap()))
}
