use tutti_proto::cluster::v1 as pb;

use super::*;
use crate::{Extent, UnitKind};

fn put(queue: &Queue, bytes: usize) {
    let (key, kind) = (pb::GraphKey::default().into(), UnitKind::Pages);
    queue.put_run(Run { key, kind, extent: Extent::Whole, first: 0, count: 1 }, vec![0; bytes]);
}

#[tokio::test]
async fn budget_is_used_until_pages_are_sent_or_dropped() {
    let budget = Arc::new(StagingBudget::new(16));
    let queue = Queue::new(Arc::clone(&budget));
    put(&queue, 1000);
    put(&queue, 24);
    assert_eq!(budget.left(), STAGED_BYTES - 1024);
    let staged = queue.next().await;
    assert_eq!(budget.left(), STAGED_BYTES - 1024, "it is being sent");
    drop(staged);
    assert_eq!(budget.left(), STAGED_BYTES - 24);
    queue.close();
    put(&queue, 8);
    assert_eq!(budget.left(), STAGED_BYTES);
    assert!(queue.next().await.is_none());
}
