use std::{
    io::{self, Write},
    sync::{Arc, Mutex},
};

use tracing::error_span;
use tracing_subscriber::{fmt::MakeWriter, layer::SubscriberExt};
use tutti_proto::{GraphId, Incarnation, RequestId};
use tutti_settings::LogFormat;

use super::*;
use crate::{
    request_id::{graph_ended, graph_launched},
    telemetry::lines,
};

#[derive(Clone, Default)]
struct Sink(Arc<Mutex<Vec<u8>>>);

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Sink {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

/// Returns the lines that `log` writes in this format.
fn written(format: LogFormat, rank: Option<u32>, log: impl FnOnce()) -> String {
    let sink = Sink::default();
    let layer = lines(format, LogName { process: "worker", rank }, sink.clone());
    tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), log);
    let bytes = sink.0.lock().unwrap().clone();
    String::from_utf8(bytes).unwrap()
}

#[test]
fn a_json_line_has_numbers_as_numbers_and_the_ids_of_its_spans() {
    let text = written(LogFormat::Json, Some(1), || {
        let outer = error_span!("http", request_id = "client-7");
        let inner = outer.in_scope(|| error_span!("generation", prompt_tokens = 12_u32));
        inner.in_scope(|| {
            tracing::warn!(kv_bytes = 5_u64, share = 0.5, why = "a \"word\"", ok = true, rank = 9, "it\nends")
        });
    });
    assert_eq!(text.matches('\n').count(), 1, "{text}");
    let line: Value = serde_json::from_str(&text).unwrap();
    for (name, value) in [
        ("level", Value::from("WARN")),
        ("process", "worker".into()),
        // A field of the event does not replace one of the process.
        ("rank", 1.into()),
        ("message", "it\nends".into()),
        ("kv_bytes", 5.into()),
        ("share", 0.5.into()),
        ("why", "a \"word\"".into()),
        ("ok", true.into()),
        ("request_id", "client-7".into()),
    ] {
        assert_eq!(line[name], value, "{name} of {text}");
    }
    assert_eq!(line["span"]["prompt_tokens"], 12);
    assert_eq!(line["spans"][0]["name"], "http");
}

#[test]
fn a_line_about_a_graph_has_the_id_of_its_request() {
    let key = GraphKey { request: RequestId(u64::MAX - 9), incarnation: Incarnation(0), graph: GraphId(2) };
    graph_launched(key, "client-8");
    let log = || tracing::warn!(%key, "the row failed");
    let line: Value = serde_json::from_str(&written(LogFormat::Json, Some(0), log)).unwrap();
    assert_eq!(line["request_id"], "client-8");
    let text = written(LogFormat::Text, Some(0), log);
    assert!(text.contains(" WARN worker 0: request_id=client-8 the row failed key="), "{text}");
    graph_ended(key);
    assert!(!written(LogFormat::Json, Some(0), log).contains("request_id"));
}

#[test]
fn a_line_of_text_names_its_process() {
    let text = written(LogFormat::Text, None, || tracing::info!(worker = 3, "is ready"));
    assert!(text.ends_with("  INFO worker: is ready worker=3\n"), "{text}");
}
