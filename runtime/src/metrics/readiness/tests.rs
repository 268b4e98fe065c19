use super::*;

#[test]
fn readiness_is_that_of_the_scrape() {
    let (metrics, health) = (Metrics::default(), Health::default());
    metrics.follow_readiness(health.clone());
    let shows = |ready: u8, draining: u8| {
        let text = metrics.encode();
        for line in [format!("\ntutti_ready {ready}\n"), format!("\ntutti_draining {draining}\n")] {
            assert!(text.contains(&line), "{line:?} is not in {text}");
        }
    };
    shows(0, 0);
    health.set_ready(State::Ok);
    shows(1, 0);
    health.drain();
    shows(0, 1);
}
