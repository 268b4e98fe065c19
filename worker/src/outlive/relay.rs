//! The way of an engine's messages to the conductor that it serves now.

use tokio::{
    sync::{mpsc, oneshot},
    task::JoinHandle,
};
use tutti_proto::cluster::v1::{self as pb, worker_message::Message as ToConductor};

/// The receiving end of an engine's outbox.
pub struct EngineMessages {
    queue: mpsc::Receiver<pb::WorkerMessage>,
    /// The engine's `Ready`; `None` until it has loaded the model.
    pub ready: Option<pb::Ready>,
}

impl EngineMessages {
    pub fn new(queue: mpsc::Receiver<pb::WorkerMessage>) -> Self {
        Self { queue, ready: None }
    }

    /// The next message; `None` once the engine has ended.
    async fn next(&mut self) -> Option<pb::WorkerMessage> {
        let message = self.queue.recv().await?;
        self.note(&message);
        Some(message)
    }

    fn note(&mut self, message: &pb::WorkerMessage) {
        if let Some(ToConductor::Ready(ready)) = &message.message {
            self.ready = Some(ready.clone());
        }
    }

    /// Drops all messages until the engine has ended.
    pub async fn drop_all(&mut self) {
        while self.next().await.is_some() {}
    }

    /// Drops the messages that are in the queue now.
    pub fn drop_queued(&mut self) {
        while let Ok(message) = self.queue.try_recv() {
            self.note(&message);
        }
    }
}

/// A task that passes an engine's messages to a conductor.
pub struct Relay {
    stop: oneshot::Sender<()>,
    task: JoinHandle<EngineMessages>,
}

impl Relay {
    /// Sends `greetings`, and then the engine's messages.
    pub fn start(
        mut messages: EngineMessages,
        greetings: Vec<pb::WorkerMessage>,
        outbox: mpsc::Sender<pb::WorkerMessage>,
    ) -> Self {
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(async move {
            tokio::select! {
                // An error means that `Relay` is dropped, because the process ends.
                _ = stopped => {}
                () = pass(&mut messages, greetings, outbox) => {}
            }
            messages
        });
        Self { stop, task }
    }

    /// Stops, and returns the engine's end. A message on its way may be lost.
    pub async fn stop(self) -> EngineMessages {
        // Ignored: the task has ended already if the stream is closed.
        let _ = self.stop.send(());
        match self.task.await {
            Ok(messages) => messages,
            Err(broken) => std::panic::resume_unwind(broken.into_panic()),
        }
    }

    /// Completes once all messages of an engine that has ended are passed on.
    pub async fn finish(self) {
        // Ignored: a task that broke has printed why.
        let _ = self.task.await;
    }
}

async fn pass(
    messages: &mut EngineMessages,
    greetings: Vec<pb::WorkerMessage>,
    outbox: mpsc::Sender<pb::WorkerMessage>,
) {
    for message in greetings {
        if outbox.send(message).await.is_err() {
            return;
        }
    }
    while let Some(message) = messages.next().await {
        if outbox.send(message).await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests;
