//! Bounds on gRPC messages that are still arriving: a number of bytes for all messages of a listener, and a time for
//! each message.
//!
//! A message's bytes take room as they arrive, not by the message's declared length. The room is free again when the
//! message is complete and passed on. A call whose message finds no room fails and does not wait, because partial
//! messages that wait for each other's room would wait forever.

mod room;

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::BoxError;
use bytes::Bytes;
use http_body::Frame;
use tokio::time::{Instant, Sleep, sleep};
use tonic::Status;

use self::room::Taken;
pub(super) use self::room::{Caller, Room};
use crate::{Error, ErrorKind};

/// Bytes before each message: a flag, and the length (PROTOCOL-HTTP2.md of gRPC, "Length-Prefixed-Message").
const PREFIX: usize = 5;

/// The bounds of one listener.
#[derive(Debug)]
pub(super) struct Receiving {
    room: Room,
    patience: Duration,
}

impl Receiving {
    /// Bounds on the messages of one listener: all messages share the bytes of `room`, and each must arrive within
    /// `patience`.
    pub fn new(room: Room, patience: Duration) -> Self {
        Self { room, patience }
    }
}

/// A request's body within the bounds of its listener.
pub(super) struct ReceivedBody<B> {
    body: B,
    receiving: Arc<Receiving>,
    caller: Caller,
    /// Room that this body's message takes.
    taken: Taken,
    framing: Framing,
    /// Time spent waiting for the current message. Time in which nobody reads the body does not count, because a busy
    /// receiver makes its sender wait.
    waited: Duration,
    /// Start of the current wait, and the timer that ends it.
    wait: Option<(Instant, Pin<Box<Sleep>>)>,
}

impl<B> ReceivedBody<B> {
    pub fn new(body: B, receiving: Arc<Receiving>, caller: Caller) -> Self {
        let (framing, taken) = Default::default();
        Self { body, receiving, caller, taken, framing, waited: Duration::ZERO, wait: None }
    }

    fn on_data(&mut self, data: &[u8]) -> Result<(), Error> {
        self.receiving.room.take(&self.caller, &mut self.taken, data.len())?;
        let before = self.framing.messages;
        self.framing.read(data);
        if self.framing.messages > before {
            self.waited = Duration::ZERO;
        }
        Ok(())
    }

    /// Waits for more of a message. Ready once `patience` has passed.
    fn poll_patience(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if self.framing.is_whole() {
            return Poll::Pending;
        }
        let left = self.receiving.patience.saturating_sub(self.waited);
        let (_, end) = self.wait.get_or_insert_with(|| (Instant::now(), Box::pin(sleep(left))));
        end.as_mut().poll(context)
    }

    fn release(&mut self) {
        self.receiving.room.give_back(&self.caller, &mut self.taken);
    }
}

impl<B> Drop for ReceivedBody<B> {
    fn drop(&mut self) {
        self.release();
    }
}

impl<B> http_body::Body for ReceivedBody<B>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        // The next frame is requested only after all complete messages have been decoded.
        if self.framing.is_whole() {
            self.release();
        }
        let polled = Pin::new(&mut self.body).poll_frame(context);
        if polled.is_ready()
            && let Some((since, _)) = self.wait.take()
        {
            self.waited += since.elapsed();
        }
        match polled {
            Poll::Ready(Some(Ok(frame))) => {
                if let Some(data) = frame.data_ref()
                    && let Err(error) = self.on_data(data)
                {
                    return Poll::Ready(Some(Err(Status::from(error).into())));
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(Some(Err(error))) => Poll::Ready(Some(Err(error.into()))),
            Poll::Ready(None) => Poll::Ready(None),
            Poll::Pending => match self.poll_patience(context) {
                Poll::Ready(()) => {
                    let message = format!("the message did not arrive within {:?}", self.receiving.patience);
                    let error = Error::new(ErrorKind::DeadlineExceeded, message);
                    Poll::Ready(Some(Err(Status::from(error).into())))
                }
                Poll::Pending => Poll::Pending,
            },
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }
}

/// The position in a stream of messages, each with its prefix.
#[derive(Debug, Default)]
struct Framing {
    prefix: [u8; PREFIX],
    /// Bytes of the current prefix that have been read.
    prefix_read: usize,
    /// Bytes of the current message that have not been read. Valid once the prefix has been read.
    remaining: usize,
    /// Number of whole messages so far.
    messages: u64,
}

impl Framing {
    fn read(&mut self, mut data: &[u8]) {
        while !data.is_empty() {
            if self.prefix_read < PREFIX {
                let count = (PREFIX - self.prefix_read).min(data.len());
                self.prefix[self.prefix_read..][..count].copy_from_slice(&data[..count]);
                self.prefix_read += count;
                data = &data[count..];
                if self.prefix_read < PREFIX {
                    return;
                }
                let [_, length @ ..] = self.prefix;
                self.remaining = u32::from_be_bytes(length) as usize;
            }
            let count = self.remaining.min(data.len());
            self.remaining -= count;
            data = &data[count..];
            if self.remaining == 0 {
                self.prefix_read = 0;
                self.messages += 1;
            }
        }
    }

    /// True between two messages.
    fn is_whole(&self) -> bool {
        self.prefix_read == 0 && self.messages > 0
    }
}

#[cfg(test)]
mod tests;
