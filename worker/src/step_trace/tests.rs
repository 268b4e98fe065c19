use tutti_engine::StepTimes;
use tutti_proto::{
    StepNumber,
    cluster::v1 as pb,
    declaration::{Walk, WalkKind},
};

use super::*;

fn record(number: u64) -> StepRecord {
    let row = RowRecord {
        key: pb::GraphKey { request: 7, incarnation: 1, graph: 0 }.into(),
        walk: WalkId(0),
        positions: 4..9,
        terminal: true,
        failed: false,
    };
    StepRecord {
        number: StepNumber(number),
        batch_walk: WalkId(1),
        rows: vec![row],
        started: UNIX_EPOCH + Duration::from_micros(12),
        times: StepTimes {
            plan_ahead: Duration::from_micros(2),
            run: Duration::from_micros(3),
            ..StepTimes::default()
        },
        kv_pages_used: 1,
        kv_pages_total: 2,
        slots_used: 3,
        slots_total: 5,
        snapshots: 1,
        void_rows: 4,
        padding_tokens: 59,
    }
}

fn writer(path: &Path) -> (Writer, Arc<AtomicU64>) {
    let walk = |name: &str| Walk { name: name.into(), nodes: vec![], kind: WalkKind::Mixed };
    let declaration =
        ModelDeclaration::new(vec![], vec![walk("prefill_text"), walk("thinker_step")], vec![]).unwrap();
    let lost = Arc::new(AtomicU64::new(0));
    (Writer { path: path.into(), rank: Rank(3), budget: 64, declaration, lost: lost.clone() }, lost)
}

#[test]
fn each_step_is_a_line_and_each_process_starts_with_a_header() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("steps.rank3");
    for process in 0..2 {
        let (sender, inbox) = sync_channel(2);
        sender.send(record(process)).unwrap();
        drop(sender);
        writer(&path).0.run(&inbox);
    }
    let text = std::fs::read_to_string(&path).unwrap();
    let lines: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 4);
    assert_eq!(lines[2]["budget_tokens"], 64);
    let expected = serde_json::json!({
        "worker": 3, "step": 1, "batch_walk": "thinker_step", "start_us": 12,
        "plan_ahead_us": 2, "plan_us": 0, "run_us": 3, "commit_us": 0, "tokens": 5, "budget_tokens": 64, "kv_pages": [1, 2],
        "slots": [3, 5], "snapshots": 1, "void_rows": 4, "padding_tokens": 59,
        "rows": [{
            "request": 7, "incarnation": 1, "walk": "prefill_text", "range": [4, 9], "terminal": true,
        }],
    });
    assert_eq!(lines[3], expected);
}

#[test]
fn a_full_disk_costs_the_trace_and_every_lost_step_is_counted() {
    let (writer, lost) = writer(Path::new("/dev/full"));
    let (steps, inbox) = sync_channel(2);
    let mut trace = StepTrace { steps, lost };
    trace.observe(record(0));
    let writing = thread::spawn(move || writer.run(&inbox));
    trace.observe(record(1));
    let StepTrace { steps, lost } = trace;
    drop(steps);
    writing.join().unwrap();
    assert!(lost.load(Ordering::Relaxed) >= 1);
}

#[test]
fn a_slow_writer_never_stops_the_engine() {
    let (steps, _inbox) = sync_channel(1);
    let mut trace = StepTrace { steps, lost: Arc::default() };
    for number in 0..10 {
        trace.observe(record(number));
    }
    assert_eq!(trace.lost(), 9);
}
