use super::*;

fn key(request: u64) -> GraphKey {
    pb::GraphKey { request, ..Default::default() }.into()
}

fn graph(request: u64, prompt: &[u32], generated: &[u32]) -> pb::LaunchGraph {
    let spec =
        pb::RequestSpec { prompt: prompt.to_vec(), cache_salt: b"salt".to_vec(), ..Default::default() };
    pb::LaunchGraph {
        key: Some(key(request).into()),
        spec: Some(spec),
        generated: generated.to_vec(),
        ..Default::default()
    }
}

/// The tokens of the prompts, in order.
fn tokens(prompts: Vec<pb::HeldPrompt>) -> Vec<Vec<u32>> {
    let mut tokens: Vec<_> = prompts.into_iter().map(|prompt| prompt.tokens).collect();
    tokens.sort_unstable();
    tokens
}

#[test]
fn abandoned_graphs_are_cancelled_and_their_prompts_answered_once() {
    let mut graphs = LiveGraphs::new(Lifetime::ManyConductors);
    graphs.launched(&graph(1, &[1, 2], &[3]));
    graphs.launched(&graph(2, &[4], &[]));
    graphs.launched(&graph(3, &[5], &[]));
    graphs.ended(key(2));
    let (answer, mut answered) = oneshot::channel();
    let mut cancelled: Vec<_> = graphs.abandon(answer).collect();
    cancelled.sort_unstable_by_key(|key| key.request);
    assert_eq!(cancelled, [key(1), key(3)]);
    // The answer waits until the engine has ended both. Their prompts are those of the moment of the conductor's death.
    assert!(graphs.is_abandoned() && answered.try_recv().is_err());
    cancelled.into_iter().for_each(|key| graphs.ended(key));
    graphs.answer();
    assert!(!graphs.is_abandoned());
    let prompts = answered.try_recv().unwrap();
    assert!(prompts.iter().all(|prompt| prompt.cache_salt == b"salt"));
    assert_eq!(tokens(prompts), [vec![1, 2, 3], vec![5]], "a prompt includes the tokens of earlier tries");
    graphs.answer();
}

#[test]
fn graphs_with_media_are_cancelled_without_their_prompts() {
    let mut graphs = LiveGraphs::new(Lifetime::ManyConductors);
    let mut heard = graph(1, &[1, 2], &[]);
    heard.spec.as_mut().unwrap().media.push(pb::MediaItem::default());
    graphs.launched(&heard);
    let (answer, mut answered) = oneshot::channel();
    assert_eq!(graphs.abandon(answer).count(), 1);
    graphs.answer();
    assert!(answered.try_recv().unwrap().is_empty());
}

#[test]
fn an_engine_of_one_conductor_keeps_no_prompts() {
    let mut graphs = LiveGraphs::new(Lifetime::OneConductor);
    graphs.launched(&graph(1, &[1], &[]));
    assert!(graphs.prompts.is_empty());
}
