//! Pushes of other workers, over the generated gRPC server, for fuzzers.

use std::{convert::Infallible, ops::Range, sync::Arc, time::Duration};

use tokio::{runtime::Builder, sync::mpsc};
use tonic::codegen::{Body, Bytes, Service, http};
use tutti_engine::{Arrival, Cargo, Waker};
use tutti_kernels::collective::GroupRank;
use tutti_models::{PageLayout, PlaneLayout, PlaneStorage, Section};
use tutti_proto::{
    GraphKey,
    cluster::v1::{self as pb, plane_transfer_server::PlaneTransferServer},
};

use super::{
    freight::Freight,
    receiver::{Receiver, Taker},
    reservations::{Reservations, ReservedSpace},
    segment::Segment,
    share_store::ShareStore,
};

/// The secret of the reservation.
pub const SECRET: [u8; 4] = *b"open";
/// Pages of the reservation.
const PAGES: usize = 5;
/// Pages that are valid before the push.
const KNOWN: usize = 1;
/// Bytes in a segment.
const SEGMENT_BYTES: u64 = 64;

/// Sends the body of a call as a push to a worker that has reserved pages, rows of embeddings, or a rank's share of
/// pages. No units reach the engine that were not reserved.
pub fn push<B>(kind: u8, body: B)
where
    B: Body<Data = Bytes, Error = Infallible> + Send + 'static,
{
    let runtime = Builder::new_current_thread().enable_time().build();
    runtime.expect("a runtime").block_on(serve(kind, body));
}

/// Hash of the layout of the units that a kind of push takes.
pub fn layout_id(kind: u8) -> u64 {
    freight(kind).layout_id
}

fn freight(kind: u8) -> Freight {
    let layout = layout(kind & 4 != 0);
    match kind % 3 {
        0 => Freight::of_layout(&layout),
        1 => Freight::of_embeddings(2),
        _ => Freight::of_share(&layout, GroupRank { rank: 1, world_size: 2 }),
    }
}

async fn serve<B>(kind: u8, body: B)
where
    B: Body<Data = Bytes, Error = Infallible> + Send + 'static,
{
    let key = GraphKey::from(pb::GraphKey { request: 1, incarnation: 0, graph: 1 });
    let freight = freight(kind);
    let share = freight.is_share().then(|| freight.clone());
    let reservations = Arc::new(Reservations::default());
    let known = if freight.cargo == Cargo::Pages { KNOWN } else { 0 };
    let segment = if kind & 8 == 0 { None } else { Segment::offer(&SECRET, SEGMENT_BYTES).map(Arc::new) };
    let space =
        ReservedSpace { freight: freight.clone(), share: share.clone(), count: PAGES, known, segment };
    reservations.expect(key, &pb::PlaneReservation { secret: SECRET.to_vec(), lease_ms: 1000 });
    reservations.hold(key, space);
    let (arrivals, mut inbox) = mpsc::channel(16);
    let (reports, mut heard) = mpsc::channel(16);
    // The channel that is not used closes.
    let taker = if share.is_none() {
        drop(reports);
        Taker::Engine { arrivals, waker: Waker::default() }
    } else {
        drop(arrivals);
        let store = ShareStore::new(1, reports);
        store.expect(key, PAGES, KNOWN);
        Taker::Rank(Arc::new(store))
    };
    let receiver = Receiver { reservations: reservations.clone(), taker };
    let mut server = PlaneTransferServer::new(receiver).max_decoding_message_size(1 << 16);
    let request = http::Request::builder()
        .method("POST")
        .uri("http://worker/tutti.cluster.v1.PlaneTransfer/Push")
        .header("content-type", "application/grpc")
        .body(body);
    let mut imported = false;
    let engine = async {
        let mut filled = 0;
        while let Some(arrival) = inbox.recv().await {
            match arrival {
                Arrival::Pages(run) => {
                    let unit = freight.bytes_of(run.cargo);
                    let allowed: Range<usize> = if run.cargo == Cargo::Slot { 0..1 } else { known..PAGES };
                    let end = run.first + run.data.len() / unit;
                    assert_eq!(run.data.len() % unit, 0, "half a unit");
                    assert!(allowed.start <= run.first && end <= allowed.end && run.first < end, "{run:?}");
                    filled += run.data.len();
                }
                Arrival::Import(import) => {
                    assert_eq!(import.key, key);
                    imported = true;
                    (import.answer)(Ok(()));
                }
                _ => panic!("an arrival that no push makes"),
            }
        }
        filled
    };
    let calling = async {
        let answer = server.call(request.expect("a request")).await;
        drop(server);
        answer
    };
    let rank = async {
        let mut complete = true;
        while let Some(report) = heard.recv().await {
            match report.report {
                Some(pb::rank_report::Report::Arrived(run)) => {
                    let most = if run.cargo == 0 { PAGES as u32 } else { 1 };
                    assert!(run.first.saturating_add(run.count) <= most && run.count > 0, "{run:?}");
                }
                Some(pb::rank_report::Report::Failed(_)) => complete = false,
                _ => panic!("a report that no push makes"),
            }
        }
        complete
    };
    let (answer, _, _) =
        tokio::time::timeout(Duration::from_secs(60), async { tokio::join!(calling, engine, rank) })
            .await
            .expect("a push hangs");
    let status = answer.map(|response| tonic::Status::from_header_map(response.headers()));
    let accepted = matches!(&status, Ok(None));
    if share.is_none() {
        assert_eq!(accepted, imported, "{status:?}");
    }
}

fn layout(has_slot: bool) -> PageLayout {
    let plane = |name: &str, storage, unit_bytes| PlaneLayout {
        name: name.into(),
        storage,
        sections: vec![Section { units: 2, unit_bytes }],
        format: "fuzz".into(),
    };
    let mut planes = vec![plane("kv", PlaneStorage::Pages { ratio: 1 }, 4)];
    planes.extend(has_slot.then(|| plane("state", PlaneStorage::Slot, 3)));
    PageLayout { page_tokens: 16, planes }
}
