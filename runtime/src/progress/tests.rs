use super::*;

#[test]
fn a_finished_or_abandoned_load_is_forgotten() {
    for bars in [false, true] {
        let display = LoadDisplay::new(bars);
        let waiting = || display.shown.lock().loads.len();
        display.update("worker 0", 1, 10);
        display.update("worker 1", 10, 10);
        assert_eq!(waiting(), 1);
        display.clone().update("worker 0", 10, 10);
        assert_eq!(waiting(), 0);
        display.update("worker 2", 0, 10);
        display.abandon("worker 2");
        assert_eq!(waiting(), 0);
    }
}
