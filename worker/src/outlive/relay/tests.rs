use super::*;

fn message(message: ToConductor) -> pb::WorkerMessage {
    pb::WorkerMessage { message: Some(message) }
}

fn ready(kv_pages_total: u32) -> pb::WorkerMessage {
    message(ToConductor::Ready(pb::Ready { kv_pages_total, ..Default::default() }))
}

fn report(step: u64) -> pb::WorkerMessage {
    let load = pb::WorkerLoad { steps: step, ..Default::default() };
    message(ToConductor::StepReport(pb::StepReport { load: Some(load), ..Default::default() }))
}

#[tokio::test]
async fn a_conductor_hears_the_greetings_and_then_the_engine() {
    let (engine, queue) = mpsc::channel(8);
    engine.send(report(1)).await.unwrap();
    let (outbox, mut heard) = mpsc::channel(8);
    let relay = Relay::start(EngineMessages::new(queue), vec![ready(7)], outbox);
    engine.send(report(2)).await.unwrap();
    for expected in [ready(7), report(1), report(2)] {
        assert_eq!(heard.recv().await, Some(expected));
    }
    // The last messages of an engine that ends are passed on before the stream closes.
    engine.send(report(3)).await.unwrap();
    drop(engine);
    relay.finish().await;
    assert_eq!((heard.recv().await, heard.recv().await), (Some(report(3)), None));
}

#[tokio::test]
async fn a_stopped_relay_returns_what_the_next_conductor_is_to_hear() {
    let (engine, queue) = mpsc::channel(8);
    let (outbox, mut heard) = mpsc::channel(8);
    let relay = Relay::start(EngineMessages::new(queue), Vec::new(), outbox);
    engine.send(ready(7)).await.unwrap();
    assert_eq!(heard.recv().await, Some(ready(7)));
    let mut messages = relay.stop().await;
    assert_eq!(messages.ready.as_ref().map(|ready| ready.kv_pages_total), Some(7));
    engine.send(report(1)).await.unwrap();
    assert_eq!(messages.next().await, Some(report(1)), "the queue goes on to the next conductor");
    assert_eq!(heard.recv().await, None);
}

#[tokio::test]
async fn a_relay_whose_conductor_reads_nothing_can_be_stopped() {
    let (engine, queue) = mpsc::channel(8);
    let (outbox, _unread) = mpsc::channel(1);
    let relay = Relay::start(EngineMessages::new(queue), vec![report(1), report(2)], outbox);
    engine.send(ready(7)).await.unwrap();
    let mut messages = relay.stop().await;
    assert_eq!(messages.next().await, Some(ready(7)), "it waits behind the greetings, and is not lost");
}

#[tokio::test]
async fn an_engine_that_becomes_ready_without_a_conductor_is_noted() {
    let (engine, queue) = mpsc::channel(8);
    let mut messages = EngineMessages::new(queue);
    engine.send(ready(7)).await.unwrap();
    engine.send(report(1)).await.unwrap();
    messages.drop_queued();
    assert_eq!(messages.ready.as_ref().map(|ready| ready.kv_pages_total), Some(7));
    engine.send(ready(8)).await.unwrap();
    drop(engine);
    messages.drop_all().await;
    assert_eq!(messages.ready.map(|ready| ready.kv_pages_total), Some(8));
}
