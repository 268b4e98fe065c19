use tutti_proto::cluster::v1 as pb;

use super::*;

fn run(bytes: usize) -> PageRun {
    PageRun {
        key: pb::GraphKey::default().into(),
        cargo: tutti_engine::Cargo::Pages,
        first: 0,
        data: vec![0; bytes],
    }
}

#[tokio::test]
async fn budget_is_used_until_pages_are_sent_or_dropped() {
    let budget = Arc::new(StagingBudget::new(16));
    let queue = Queue::new(Arc::clone(&budget));
    queue.put_pages(run(1000));
    queue.put_pages(run(24));
    assert_eq!(budget.left(), STAGED_BYTES - 1024);
    let parcel = queue.next().await;
    assert_eq!(budget.left(), STAGED_BYTES - 1024, "it is being sent");
    drop(parcel);
    assert_eq!(budget.left(), STAGED_BYTES - 24);
    queue.close();
    queue.put_pages(run(8));
    assert_eq!(budget.left(), STAGED_BYTES);
    assert!(queue.next().await.is_none());
}
