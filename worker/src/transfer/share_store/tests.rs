use std::task::Poll;

use tutti_kernels::{PageId, SlotId};
use tutti_models::{PageLayout, PlaneLayout, PlaneStorage, Section};

use super::*;

const PAGE_BYTES: usize = 8;

fn key() -> GraphKey {
    pb::GraphKey { request: 1, incarnation: 0, graph: 1 }.into()
}

/// A rank's share of pages and a slot.
fn freight() -> Freight {
    let plane = |name: &str, storage, unit_bytes| PlaneLayout {
        name: name.into(),
        storage,
        sections: vec![Section { units: 2, unit_bytes }],
        format: "test".into(),
    };
    let planes = vec![
        plane("kv", PlaneStorage::Pages { ratio: 1 }, PAGE_BYTES),
        plane("state", PlaneStorage::Slot, 4),
    ];
    let group_rank = tutti_kernels::collective::GroupRank { rank: 1, world_size: 2 };
    Freight::of_share(&PageLayout { page_tokens: 16, planes }, group_rank)
}

fn pages(first: usize, data: Vec<u8>) -> PageRun {
    PageRun { key: key(), cargo: Cargo::Pages, first, data }
}

fn units(first: usize, count: usize) -> ShareRun {
    ShareRun { key: key(), first, units: ShareUnits::Pages(vec![PageId(9); count]) }
}

fn end(counts: &[u32]) -> pb::HandOver {
    pb::HandOver { first: None, computed_tokens: 40, counts: counts.to_vec() }
}

#[tokio::test]
async fn each_run_is_reported_once_and_taken_once() {
    let (reports, mut heard) = mpsc::channel(8);
    let (store, freight) = (ShareStore::new(1, reports), freight());
    assert!(store.put(&freight, pages(1, vec![1; 16])).await.is_err(), "no request waits for it");
    store.expect(key(), 3, 1);
    // These pages come twice, as from a sender that repeats them.
    for byte in [1, 2] {
        store.put(&freight, pages(1, vec![byte; 16])).await.unwrap();
        let report = heard.try_recv().unwrap().report;
        let arrived = pb::ShareArrived { key: Some(key().into()), cargo: 0, first: 1, count: 2 };
        assert_eq!(report, Some(Report::Arrived(arrived)));
    }
    assert_eq!(store.take(&units(1, 1)), None, "another run");
    assert_eq!(store.take(&units(1, 2)), Some(vec![1; 16]));
    assert_eq!(store.take(&units(1, 2)), Some(vec![2; 16]));
    assert_eq!(store.take(&units(1, 2)), None);
    store.put(&freight, PageRun { cargo: Cargo::Slot, ..pages(0, vec![3; 4]) }).await.unwrap();
    let slot = ShareRun { units: ShareUnits::Slot(SlotId(5)), ..units(0, 0) };
    store.complete(key(), &freight, &end(&[3, 1])).await.unwrap();
    assert_eq!(store.take(&slot), Some(vec![3; 4]));
    store.put(&freight, pages(2, vec![4; 8])).await.unwrap();
    store.forget(key());
    assert_eq!(store.take(&units(2, 1)), None);
}

#[tokio::test]
async fn a_share_that_lacks_a_unit_is_reported_as_failed() {
    let freight = freight();
    for (missing, counts, named) in [
        (Some(1), [3, 1], "rank 1, page 1 of 3 is missing"),
        (Some(2), [3, 1], "rank 1, page 2 of 3 is missing"),
        (Some(3), [3, 1], "rank 1, the slot is missing"),
        (None, [2, 1], "[2, 1] units are handed over, but [3, 1] are reserved"),
    ] {
        let (reports, mut heard) = mpsc::channel(8);
        let store = ShareStore::new(1, reports);
        store.expect(key(), 3, 1);
        for page in [1, 2] {
            if missing != Some(page) {
                store.put(&freight, pages(page, vec![0; 8])).await.unwrap();
            }
        }
        if missing != Some(3) {
            store.put(&freight, PageRun { cargo: Cargo::Slot, ..pages(0, vec![0; 4]) }).await.unwrap();
        }
        let status = store.complete(key(), &freight, &end(&counts)).await.unwrap_err();
        assert!(status.message().contains(named), "{status}");
        let mut last = None;
        while let Ok(report) = heard.try_recv() {
            last = report.report;
        }
        assert!(matches!(last, Some(Report::Failed(failed)) if failed.reason.contains(named)));
    }
}

#[tokio::test]
async fn a_full_store_makes_a_run_wait_until_another_is_taken() {
    let (reports, _heard) = mpsc::channel(8);
    let (store, freight) = (ShareStore::new(1, reports), freight());
    let count = STAGED_BYTES / PAGE_BYTES;
    store.expect(key(), count + 1, 0);
    store.put(&freight, pages(0, vec![0; STAGED_BYTES])).await.unwrap();
    let mut next = std::pin::pin!(store.put(&freight, pages(count, vec![0; PAGE_BYTES])));
    assert!(matches!(poll_once(next.as_mut()).await, Poll::Pending));
    drop(store.take(&units(0, count)));
    next.await.unwrap();
}

/// Polls a future once.
async fn poll_once<T>(mut future: std::pin::Pin<&mut impl Future<Output = T>>) -> Poll<T> {
    std::future::poll_fn(|context| Poll::Ready(future.as_mut().poll(context))).await
}
