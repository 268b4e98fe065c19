use std::sync::Arc;

use tutti_kernels::collective::GroupRank;

use super::*;

fn key(request: u64) -> GraphKey {
    pb::GraphKey { request, incarnation: 0, graph: 1 }.into()
}

fn layout(ranks: usize) -> UnitLayout {
    UnitLayout { share: GroupRank { rank: 0, world_size: ranks }, ..UnitLayout::of_embeddings(2) }
}

fn ranks() -> Ranks {
    Ranks::new(layout(3), Ok([7; 16]))
}

fn reserve(ranks: &Ranks, request: u64) -> bool {
    ranks.order(key(request), Order::Reserve(pb::ReserveShare::default()))
}

fn room(port: u32) -> pb::RankRoom {
    pb::RankRoom { port, ..Default::default() }
}

#[test]
fn the_slowest_rank_bounds_what_is_staged() {
    let ranks = ranks();
    assert_eq!(ranks.left(), STAGED_BYTES);
    ranks.staged(STAGED_BYTES);
    assert_eq!(ranks.left(), 0);
    assert!(ranks.released(1, STAGED_BYTES as u64), "the engine waits");
    assert_eq!(ranks.left(), 0, "rank 2 has sent nothing");
    assert!(ranks.released(2, 100));
    assert_eq!(ranks.left(), 100);
    ranks.released(2, STAGED_BYTES as u64);
    assert_eq!(ranks.left(), STAGED_BYTES);
    assert!(!ranks.released(2, STAGED_BYTES as u64), "the engine has found enough");
}

#[test]
fn ranks_forget_only_what_they_were_told() {
    let ranks = ranks();
    ranks.forget(key(1));
    assert_eq!(ranks.take_orders(), []);
    assert!(reserve(&ranks, 1), "the first order");
    assert!(!reserve(&ranks, 2));
    ranks.forget(key(1));
    ranks.forget(key(1));
    ranks.handed_over(key(2));
    ranks.forget(key(2));
    let orders: Vec<_> = ranks.take_orders().into_iter().filter_map(|order| order.order).collect();
    let [Order::Reserve(_), Order::Reserve(_), Order::Forget(forgotten)] = &orders[..] else {
        panic!("{orders:?}")
    };
    assert_eq!(*forgotten, key(1).into());
}

#[tokio::test]
async fn rooms_are_complete_once_all_ranks_have_answered() {
    let ranks = Arc::new(ranks());
    reserve(&ranks, 1);
    let (patience, asked) = (Duration::from_secs(120), Arc::clone(&ranks));
    let rooms = tokio::spawn(async move { asked.rooms(key(1), patience).await });
    ranks.held(key(9), 1, room(1));
    ranks.held(key(1), 2, room(2));
    tokio::task::yield_now().await;
    assert!(!rooms.is_finished());
    ranks.held(key(1), 1, room(3));
    assert_eq!(rooms.await.unwrap(), Ok(vec![room(3), room(2)]));

    reserve(&ranks, 2);
    ranks.held(key(2), 1, room(1));
    let late = ranks.rooms(key(2), Duration::from_millis(1)).await.unwrap_err();
    assert!(late.contains("rank 2 has made no room"), "{late}");
    // If the request ends, or if a rank no longer reports, the list of the ranks' reserved rooms is empty. The other
    // group's ranks then push no shares, and this group's leader receives whole pages.
    reserve(&ranks, 3);
    reserve(&ranks, 4);
    ranks.forget(key(3));
    assert_eq!(ranks.rooms(key(3), patience).await, Ok(vec![]));
    assert!(ranks.lose("rank 2 is gone").contains(&key(4)));
    assert_eq!(ranks.rooms(key(4), patience).await, Ok(vec![]));
    assert_eq!((ranks.lost().as_deref(), ranks.left()), (Some("rank 2 is gone"), usize::MAX));
}

#[test]
fn only_the_secret_is_the_secret() {
    let shows =
        |ranks: &Ranks, secret: &[u8]| ranks.is_shown(credential::call((), secret).metadata().as_ref());
    let ranks = ranks();
    assert!(shows(&ranks, &[7; 16]) && !shows(&ranks, &[8; 16]) && !shows(&ranks, &[]));
    assert!(!ranks.is_shown(&HeaderMap::new()));
    let without = Ranks::new(layout(2), Err("no secret".into()));
    assert!(!shows(&without, &[0; 16]) && !shows(&without, &[]));
    assert_eq!(without.lost().as_deref(), Some("no secret"));
}
