//! Pushes of other workers, sent through the generated gRPC server, for fuzzers.

use std::{
    convert::Infallible,
    net::{IpAddr, Ipv4Addr},
    ops::Range,
    sync::Arc,
    time::Duration,
};

use prost::Message;
use tokio::{
    runtime::{Builder, Handle},
    sync::{mpsc, watch},
};
use tonic::codegen::{Body, Bytes, Service, http};
use tutti_kernels::collective::GroupRank;
use tutti_proto::{
    GraphKey,
    cluster::v1::{self as pb, plane_data::Place, plane_piece::Piece},
};

use crate::{
    Endpoint, Event, Extent, Hosts, PageLayout, PlaneLayout, PlaneStorage, Section, Source, UnitKind,
    UnitLayout, Units, checksum,
    endpoint::Role,
    receive::{Receiver, Space},
    segment::Segment,
};

/// The secret of the reservation.
pub const SECRET: [u8; 4] = *b"open";
/// Number of pages of the reservation.
const PAGES: usize = 5;
/// Number of pages that are valid before the push.
const KNOWN: usize = 1;
/// Size of a segment in bytes.
const SEGMENT_BYTES: u64 = 64;

/// Sends the body of a call as a push to a worker that has reserved pages, rows of embeddings, or a rank's share of
/// pages. Asserts that only reserved units reach the engine.
pub fn push<B>(kind: u8, body: B)
where
    B: Body<Data = Bytes, Error = Infallible> + Send + 'static,
{
    let runtime = Builder::new_current_thread().enable_time().build();
    runtime.expect("a runtime").block_on(serve(kind, body));
}

/// Sets the checksum of a message of a push, so that a fuzzer reaches the code behind the check of checksums. Other
/// bytes are returned unchanged.
pub fn sealed(message: &[u8]) -> Vec<u8> {
    let Ok(pb::PlanePiece { piece: Some(piece) }) = pb::PlanePiece::decode(message) else {
        return message.to_vec();
    };
    let piece = match checksum::seal(piece) {
        // Nothing writes to the segment, so all of its bytes are zero.
        Piece::Data(mut data) => {
            if let Some(Place::Shared(range)) = &data.place
                && range.length <= SEGMENT_BYTES
            {
                let zeros = [0; SEGMENT_BYTES as usize];
                let bytes = &zeros[..range.length as usize];
                data.checksum = checksum::of_units(data.kind, data.first, data.count, bytes);
            }
            Piece::Data(data)
        }
        piece => piece,
    };
    pb::PlanePiece { piece: Some(piece) }.encode_to_vec()
}

/// Hash of the layout of the units that a kind of push takes.
pub fn layout_id(kind: u8) -> u64 {
    pushed(kind).id
}

/// The rank that takes shares.
const FOLLOWER: GroupRank = GroupRank { rank: 1, world_size: 2 };

/// Layout of the units that a kind of push takes.
fn pushed(kind: u8) -> UnitLayout {
    let layout = page_layout(kind & 4 != 0);
    match kind % 3 {
        0 => UnitLayout::of_pages(&layout, GroupRank::ALONE),
        1 => UnitLayout::of_embeddings(2),
        _ => UnitLayout::of_pages(&layout, FOLLOWER),
    }
}

async fn serve<B>(kind: u8, body: B)
where
    B: Body<Data = Bytes, Error = Infallible> + Send + 'static,
{
    let key = GraphKey::from(pb::GraphKey { request: 1, incarnation: 0, graph: 1 });
    let layout = pushed(kind);
    let known = if layout.kind == UnitKind::Pages { KNOWN } else { 0 };
    let segment = if kind & 8 == 0 { None } else { Segment::offer(&SECRET, SEGMENT_BYTES).map(Arc::new) };
    let network = IpAddr::from(Ipv4Addr::LOCALHOST).into();
    // Each kind of push uses one of two queues. The other queue is closed.
    let (connector, mut heard) = if layout.is_share() {
        let hosts = Hosts { own: network, leader: Ipv4Addr::LOCALHOST.into() };
        let (load, pages) = (watch::Sender::default(), page_layout(kind & 4 != 0));
        let connector = Endpoint::follower(FOLLOWER, hosts, &pages, load, &Handle::current());
        let Role::Follower(follower) = &connector.endpoint.role else { panic!("not a follower") };
        follower.store.expect(key, PAGES, KNOWN);
        let inbox = follower.inbox.lock().expect("no test has panicked").take();
        (connector, inbox.expect("the reports are not read yet"))
    } else {
        let units = Units::new(&page_layout(kind & 4 != 0), GroupRank::ALONE, 2);
        let connector = Endpoint::leader(units, network, &mpsc::channel(1).0, || {}).1;
        (connector, mpsc::channel(1).1)
    };
    let (reservations, role) = (connector.endpoint.reservations.clone(), connector.endpoint.role.clone());
    let mut inbox = connector.inbox;
    drop(connector.endpoint);
    let (is_share, units) = (layout.is_share(), layout.clone());
    reservations.expect(key, &pb::PlaneReservation { secret: SECRET.to_vec(), lease_ms: 1000 });
    reservations.hold(key, Space { layout, share: None, count: PAGES, known, segment });
    let receiver = Receiver { reservations, role, counts: Arc::default() };
    let mut server = receiver.into_service(1 << 16);
    let request = http::Request::builder()
        .method("POST")
        .uri("http://worker/tutti.cluster.v1.PlaneTransfer/Push")
        .header("content-type", "application/grpc")
        .header("authorization", format!("Bearer {}", SECRET.map(|byte| format!("{byte:02x}")).concat()))
        .header("tutti-graph", key.to_string())
        .body(body);
    let mut imported = false;
    let engine = async {
        let mut filled = 0;
        while let Some(event) = inbox.recv().await {
            match event {
                Event::Arrived(run, Source::Here(data)) => {
                    let allowed: Range<usize> = if run.kind == UnitKind::Slot { 0..1 } else { known..PAGES };
                    let end = run.first + run.count;
                    assert_eq!(run.extent, Extent::Whole);
                    assert_eq!(
                        data.len(),
                        run.count * units.bytes_of(run.kind),
                        "other bytes than those of the run"
                    );
                    assert!(allowed.start <= run.first && end <= allowed.end && run.first < end, "{run:?}");
                    filled += data.len();
                }
                Event::Import(import) => {
                    assert_eq!(import.key, key);
                    imported = true;
                    (import.answer)(Ok(()));
                }
                _ => panic!("an event that no push makes"),
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
                    let most = if run.kind == 0 { PAGES as u32 } else { 1 };
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
    if !is_share {
        assert_eq!(accepted, imported, "{status:?}");
    }
}

fn page_layout(has_slot: bool) -> PageLayout {
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
