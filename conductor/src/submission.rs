//! A request as its client holds it: a stream of events whose end, or whose drop, is the end of the request.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use tokio::task::AbortHandle;
use tokio_stream::Stream;
use tutti_proto::{RequestId, cluster::v1 as pb};
use tutti_runtime::Error;

use crate::{cluster::Cluster, mailbox::Receiver};

/// Dropped before its last item, it cancels the request; once, since there is one of it.
#[derive(Debug)]
pub struct Submission {
    cluster: Arc<Cluster>,
    id: RequestId,
    output: Receiver,
    deadline: Option<AbortHandle>,
}

impl Submission {
    pub(crate) fn new(cluster: Arc<Cluster>, id: RequestId, output: Receiver) -> Self {
        Self { cluster, id, output, deadline: None }
    }

    /// The request's id.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// Fails the request once this much time has passed, whether or not anybody reads. Must run inside a Tokio runtime.
    #[must_use]
    pub fn with_timeout(mut self, timeout_ms: u32) -> Self {
        let (cluster, id) = (self.cluster.clone(), self.id);
        let timer = tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(timeout_ms.into())).await;
            cluster.expire(id, timeout_ms);
        });
        self.deadline = Some(timer.abort_handle());
        self
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
        if let Some(timer) = self.deadline.take() {
            timer.abort();
        }
        if !self.output.is_finished() {
            self.cluster.cancel(self.id);
        }
    }
}
