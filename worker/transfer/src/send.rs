//! The sending side: the queues of all pushes of this process, and the memory and connections that the pushes share.

mod connections;
mod counts;
mod push;
mod staging;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use tutti_proto::{GraphKey, cluster::v1 as pb};
use tutti_scheduler::TransferError;

use self::{connections::Connections, push::Push, staging::Queue};
pub(crate) use self::{
    counts::TransferCounts,
    staging::{STAGED_BYTES, StagingBudget},
};
use crate::{HandOver, Network, Run, UnitLayout};

/// All pushes of this process.
pub(crate) struct Sender {
    pub staging: Arc<StagingBudget>,
    pub counts: Arc<TransferCounts>,
    queues: Mutex<HashMap<GraphKey, Arc<Queue>>>,
    connections: Arc<Connections>,
}

impl Sender {
    /// `largest_unit` is the number of bytes of the largest unit that is ever pushed.
    pub fn new(largest_unit: usize, network: Network) -> Self {
        Self {
            staging: Arc::new(StagingBudget::new(largest_unit)),
            counts: Arc::default(),
            queues: Mutex::default(),
            connections: Arc::new(Connections::new(network)),
        }
    }

    fn queues(&self) -> MutexGuard<'_, HashMap<GraphKey, Arc<Queue>>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens the queue of a request's `count` pages or rows, and returns its push. `None` if the request has a queue
    /// already.
    pub fn begin(
        &self,
        key: GraphKey,
        destination: pb::PlaneDestination,
        layout: UnitLayout,
        count: usize,
    ) -> Option<Push> {
        let queue = Arc::new(Queue::new(Arc::clone(&self.staging)));
        let mut queues = self.queues();
        if queues.contains_key(&key) {
            return None;
        }
        queues.insert(key, Arc::clone(&queue));
        let (connections, counts) = (Arc::clone(&self.connections), Arc::clone(&self.counts));
        Some(Push { destination, layout, count, queue, connections, counts })
    }

    /// Runs a push to its end and closes its queue. `None` if the request has ended on this worker.
    pub async fn run(&self, key: GraphKey, push: Push) -> Option<Result<(), TransferError>> {
        let outcome = push.run().await;
        // No task will send the units that are still staged, so they are dropped.
        self.close(key);
        outcome
    }

    /// Queues units. Drops them if the request's queue is closed because its push has ended.
    pub fn put(&self, run: Run, data: Vec<u8>) {
        let queue = self.queues().get(&run.key).cloned();
        match queue {
            Some(queue) => queue.put_run(run, data),
            None => self.staging.drop_bytes(data.len()),
        }
    }

    /// Queues the end of a request's units.
    pub fn put_end(&self, key: GraphKey, hand_over: HandOver, since: Instant) {
        let queue = self.queues().get(&key).cloned();
        queue.iter().for_each(|queue| queue.put_end(hand_over, since));
    }

    /// True if the request is being pushed.
    pub fn has(&self, key: GraphKey) -> bool {
        self.queues().contains_key(&key)
    }

    /// Closes a request's queue. Its push then ends, unless it already waits for the receiver's answer.
    pub fn close(&self, key: GraphKey) {
        let queue = self.queues().remove(&key);
        queue.iter().for_each(|queue| queue.close());
    }
}
