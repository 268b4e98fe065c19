//! The client's handle of a request: a stream of events. Dropping the handle cancels the request.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use tokio::task::AbortHandle;
use tokio_stream::Stream;
use tutti_proto::{RequestId, cluster::v1 as pb};
use tutti_runtime::Error;

use crate::{cluster::Cluster, mailbox::Receiver, request::Deadline};

/// A request in flight. Dropping the submission before its last item has been read cancels the request.
#[derive(Debug)]
pub struct Submission {
    cluster: Arc<Cluster>,
    id: RequestId,
    output: Receiver,
    /// Task that fails the request at its deadline, even if the worker does not respond or nobody reads the stream.
    timer: Option<AbortHandle>,
}

impl Submission {
    /// Starts the deadline's timer. Must be called inside a Tokio runtime.
    pub(crate) fn new(
        cluster: Arc<Cluster>,
        id: RequestId,
        output: Receiver,
        deadline: Option<Deadline>,
    ) -> Self {
        let timer = deadline.map(|deadline| {
            let cluster = cluster.clone();
            let timer = tokio::spawn(async move {
                tokio::time::sleep_until(deadline.at.into()).await;
                cluster.expire(id, deadline);
            });
            timer.abort_handle()
        });
        Self { cluster, id, output, timer }
    }

    /// The request's id.
    pub fn id(&self) -> RequestId {
        self.id
    }
}

impl Stream for Submission {
    type Item = Result<pb::RequestEvent, Error>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Pin::new(&mut self.output).poll_next(context)
    }
}

impl Drop for Submission {
    fn drop(&mut self) {
        if let Some(timer) = self.timer.take() {
            timer.abort();
        }
        if !self.output.is_finished() {
            self.cluster.cancel(self.id);
        }
    }
}
