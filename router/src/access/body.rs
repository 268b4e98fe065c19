//! The body of an answer, which notes its end in the request's record.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use axum::body::{Bytes, HttpBody};
use http_body::{Frame, SizeHint};
use tonic::Code;

use super::{AnswerEnd, RequestRecord};

/// A body that keeps the request's record until the answer is sent.
pub struct RecordedBody<B: HttpBody> {
    body: B,
    record: RequestRecord,
    bytes: u64,
    is_over: bool,
}

impl<B: HttpBody> RecordedBody<B> {
    /// Wraps a body.
    pub fn new(body: B, record: RequestRecord) -> Self {
        // Nobody polls the body of an answer to a HEAD.
        let is_over = record.is_head();
        Self { body, record, bytes: 0, is_over }
    }
}

impl<B: HttpBody<Data = Bytes> + Unpin> HttpBody for RecordedBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        match &frame {
            None => self.is_over = true,
            Some(Ok(frame)) => {
                self.bytes += frame.data_ref().map_or(0, |data| data.len() as u64);
                if let Some(status) = frame.trailers_ref().and_then(|trailers| trailers.get("grpc-status")) {
                    self.record.ended_with(Code::from_bytes(status.as_bytes()));
                }
            }
            Some(Err(_)) => {}
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl<B: HttpBody> Drop for RecordedBody<B> {
    fn drop(&mut self) {
        // A server does not poll for the end of a body whose length is known.
        let is_whole = self.is_over || self.body.is_end_stream();
        self.record.answer_ended(AnswerEnd { bytes: self.bytes, is_whole });
    }
}
