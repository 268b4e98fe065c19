//! The listener of routers and operators: the callers that it admits, and the calls that it refuses.

use tokio::net::UnixListener;
use tonic::{Code, Request, transport::Endpoint};
use tutti_conductor::service::{ConductorService, cluster_routes};
use tutti_proto::cluster::v1::{self as pb, conductor_client::ConductorClient};
use tutti_runtime::{Error, ErrorKind, checkpoint::Checkpoint, serve, shutdown::Shutdown};
use tutti_settings::ConnectionSettings;

use crate::bench::{Bench, limits, soon, token};

type Client = ConductorClient<tonic::transport::Channel>;

/// Serves the cluster's control on a socket in `directory`.
pub async fn serve(bench: &Bench, secret: Option<&str>, directory: &tempfile::TempDir) -> Client {
    let checkpoint = Checkpoint { name: "tiny".into(), dir: directory.path().to_owned() };
    let conductor =
        ConductorService::new(bench.cluster.clone(), checkpoint.into(), Shutdown::default()).into_server();
    let routes = cluster_routes(conductor, secret.map(token), bench.health.clone());
    let path = directory.path().join("cluster.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let (windows, connections) = (serve::Windows::default(), ConnectionSettings::default());
    tokio::spawn(serve::grpc(listener, routes, windows, connections, Shutdown::default()));
    let channel = Endpoint::from_shared(format!("unix:{}", path.display())).unwrap().connect().await.unwrap();
    ConductorClient::new(channel)
}

/// A call with this secret. An empty secret is not sent.
fn call<T>(message: T, secret: &str) -> Request<T> {
    let mut request = Request::new(message);
    if !secret.is_empty() {
        token(secret).add_to(request.metadata_mut().as_mut());
    }
    request
}

#[tokio::test]
async fn every_call_must_show_the_secret() {
    let (bench, directory) = (Bench::new(limits(1)).await, tempfile::tempdir().unwrap());
    let mut client = serve(&bench, Some("open sesame"), &directory).await;
    for shown in ["", "open barley"] {
        let drain = client.drain_worker(call(pb::DrainWorkerRequest { worker: Some(0) }, shown)).await;
        let submit = client.submit(call(pb::SubmitRequest::default(), shown)).await.map(drop);
        let read = client.read_checkpoint_file(call(pb::ReadCheckpointFileRequest { file: 1 }, shown)).await;
        let statuses = [
            drain.unwrap_err(),
            submit.unwrap_err(),
            read.map(drop).unwrap_err(),
            client.get_cluster(call(pb::GetClusterRequest {}, shown)).await.unwrap_err(),
            client.cancel_request(call(pb::CancelRequestRequest::default(), shown)).await.unwrap_err(),
            client.describe(call(pb::DescribeRequest {}, shown)).await.unwrap_err(),
        ];
        for status in statuses {
            assert_eq!(status.code(), Code::Unauthenticated);
            assert_eq!(Error::from(status).field(), Some("cluster_token_file"));
        }
    }
    let phases = bench.cluster.status().workers;
    assert!(phases.iter().all(|worker| worker.phase() != pb::WorkerPhase::Drained), "a stranger drained it");
    client.get_cluster(call(pb::GetClusterRequest {}, "open sesame")).await.unwrap();
}

#[tokio::test]
async fn an_empty_drain_drains_no_worker() {
    let (bench, directory) = (Bench::new(limits(1)).await, tempfile::tempdir().unwrap());
    let _worker = bench.ready(0).await;
    let mut client = serve(&bench, None, &directory).await;
    let status = client.drain_worker(pb::DrainWorkerRequest { worker: None }).await.unwrap_err();
    let error = Error::from(status);
    assert_eq!((error.kind(), error.field()), (ErrorKind::InvalidArgument, Some("worker")));
    assert_eq!(bench.metric("tutti_workers_ready"), 1);
    let drained = soon("the drain", client.drain_worker(pb::DrainWorkerRequest { worker: Some(0) })).await;
    assert_eq!(drained.unwrap().into_inner().phase(), pb::WorkerPhase::Draining);
}
