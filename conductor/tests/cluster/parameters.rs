//! The bounds of every parameter at the conductor's own gRPC service, which routers of other builds may call.

use tonic::Code;
use tutti_proto::{
    cluster::v1::{self as pb, conductor_client::ConductorClient},
    probes::probes,
};
use tutti_runtime::Error;

use crate::bench::{Bench, FakeWorker, limits, ready, spec};
use crate::control;

const VOCAB: u32 = 2000;

/// Submits a valid request, checks that the worker receives it, and drops it.
async fn passes(
    client: &mut ConductorClient<tonic::transport::Channel>,
    worker: &mut FakeWorker,
    bench: &Bench,
    wanted: &pb::RequestSpec,
) {
    let message = pb::SubmitRequest { spec: Some(wanted.clone()), ..Default::default() };
    let stream = client.submit(message).await.unwrap_or_else(|status| panic!("{status}: {wanted:?}"));
    let launch = worker.launched().await;
    assert_eq!(launch.spec.as_ref(), Some(wanted));
    drop(stream);
    assert_eq!(worker.cancelled().await, launch.key);
    worker.confirm_cancel(launch.key).await;
    bench.idle().await;
}

#[tokio::test]
async fn every_bound_is_exact_at_the_conductor() {
    let (bench, directory) = (Bench::new(limits(1)).await, tempfile::tempdir().unwrap());
    let good = spec(16);
    let ready = ready();
    let model = pb::ModelDescription {
        vocab_size: VOCAB,
        max_request_tokens: good.prompt.len() as u32 + 16,
        ..ready.model.clone().unwrap()
    };
    let mut worker = bench.ready_with(0, pb::Ready { model: Some(model), ..ready }).await;
    let mut client = control::serve(&bench, None, &directory).await;
    for probe in probes(&good, VOCAB) {
        let Some([value, limit]) = &probe.refused else {
            passes(&mut client, &mut worker, &bench, &probe.spec).await;
            continue;
        };
        let message = pb::SubmitRequest { spec: Some(probe.spec.clone()), ..Default::default() };
        let status = client.submit(message).await.map(drop).unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{status}");
        let error = Error::from(status);
        assert_eq!(error.field(), Some(probe.parameter), "{error}");
        assert!(error.message().contains(value) && error.message().contains(limit), "{error}");
    }
    passes(&mut client, &mut worker, &bench, &good).await;
}
