use std::task::Poll;

use tutti_kernels::collective::GroupRank;

use super::*;
use crate::{Extent, PageLayout, PlaneLayout, PlaneStorage, Section, UnitKind};

const PAGE_BYTES: usize = 8;

fn key() -> GraphKey {
    pb::GraphKey { request: 1, incarnation: 0, graph: 1 }.into()
}

/// A rank's share of pages and a slot.
fn layout() -> UnitLayout {
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
    UnitLayout::of_pages(&PageLayout { page_tokens: 16, planes }, GroupRank { rank: 1, world_size: 2 })
}

fn pages(first: usize, count: usize) -> Run {
    Run { key: key(), kind: UnitKind::Pages, extent: Extent::Share, first, count }
}

fn slot() -> Run {
    Run { kind: UnitKind::Slot, ..pages(0, 1) }
}

fn end(counts: &[u32]) -> pb::HandOver {
    pb::HandOver { computed_tokens: 40, counts: counts.to_vec(), ..Default::default() }
}

#[tokio::test]
async fn each_run_is_reported_once_and_taken_once() {
    let (reports, mut heard) = mpsc::channel(8);
    let store = ShareStore::new(1, reports);
    assert!(store.put(pages(1, 2), vec![1; 16]).await.is_err(), "no request waits for it");
    store.expect(key(), 3, 1);
    // Pages arrive twice, because a sender may repeat pages.
    for byte in [1, 2] {
        store.put(pages(1, 2), vec![byte; 16]).await.unwrap();
        let report = heard.try_recv().unwrap().report;
        let arrived = pb::ShareArrived { key: Some(key().into()), kind: 0, first: 1, count: 2 };
        assert_eq!(report, Some(Report::Arrived(arrived)));
    }
    assert_eq!(store.take(&pages(1, 1)), None, "another run");
    assert_eq!(store.take(&pages(1, 2)), Some(vec![1; 16]));
    assert_eq!(store.take(&pages(1, 2)), Some(vec![2; 16]));
    assert_eq!(store.take(&pages(1, 2)), None);
    store.put(slot(), vec![3; 4]).await.unwrap();
    store.complete(key(), &layout(), &end(&[3, 1])).await.unwrap();
    assert_eq!(store.take(&slot()), Some(vec![3; 4]));
    store.put(pages(2, 1), vec![4; 8]).await.unwrap();
    store.forget(key());
    assert_eq!(store.take(&pages(2, 1)), None);
}

#[tokio::test]
async fn a_share_that_lacks_a_unit_is_reported_as_failed() {
    let layout = layout();
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
                store.put(pages(page, 1), vec![0; 8]).await.unwrap();
            }
        }
        if missing != Some(3) {
            store.put(slot(), vec![0; 4]).await.unwrap();
        }
        let status = store.complete(key(), &layout, &end(&counts)).await.unwrap_err();
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
    let store = ShareStore::new(1, reports);
    let count = STAGED_BYTES / PAGE_BYTES;
    store.expect(key(), count + 1, 0);
    store.put(pages(0, count), vec![0; STAGED_BYTES]).await.unwrap();
    let mut next = std::pin::pin!(store.put(pages(count, 1), vec![0; PAGE_BYTES]));
    assert!(matches!(poll_once(next.as_mut()).await, Poll::Pending));
    drop(store.take(&pages(0, count)));
    next.await.unwrap();
}

/// Polls a future once.
async fn poll_once<T>(mut future: std::pin::Pin<&mut impl Future<Output = T>>) -> Poll<T> {
    std::future::poll_fn(|context| Poll::Ready(future.as_mut().poll(context))).await
}
