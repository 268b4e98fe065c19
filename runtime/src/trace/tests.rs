use opentelemetry::trace::TracerProvider;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tutti_proto::cluster::v1 as pb;

use super::*;

const TRACEPARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

fn with_tracer() {
    set_tracer(SdkTracerProvider::builder().build().tracer("test"));
}

fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
    pairs.iter().map(|(name, value)| (http::HeaderName::from_static(name), value.parse().unwrap())).collect()
}

#[test]
fn a_context_is_the_same_after_its_way_through_a_message() {
    with_tracer();
    let client =
        ClientSpan::of(&headers(&[("traceparent", TRACEPARENT), ("tracestate", "a=1,b=2")])).unwrap();
    let sent = TraceContext(client.0.span().span_context().clone());
    let message = sent.to_message();
    assert_eq!(message.span_id, 0xb7ad_6b71_6920_3331);
    assert_eq!(message.trace_id[..2], [0x0a, 0xf7]);
    assert_eq!(TraceContext::received(Some(message)), Some(sent));
}

#[test]
fn what_is_no_traceparent_is_left_alone() {
    with_tracer();
    let zero = "00-00000000000000000000000000000000-b7ad6b7169203331-01";
    for bad in ["", "00", "x", zero, &TRACEPARENT[..50], &TRACEPARENT.to_uppercase(), "ff-1-1-01"] {
        assert!(ClientSpan::of(&headers(&[("traceparent", bad)])).is_none(), "{bad}");
    }
    assert!(ClientSpan::of(&headers(&[])).is_none());
    assert!(ClientSpan::of(&headers(&[("traceparent", TRACEPARENT)])).is_some());
}

#[test]
fn a_long_tracestate_is_not_passed_on() {
    with_tracer();
    let state = |length: usize| format!("a={}", "x".repeat(length - 2));
    for (length, kept) in [(200, true), (MAX_TRACESTATE_BYTES + 1, false)] {
        let client =
            ClientSpan::of(&headers(&[("traceparent", TRACEPARENT), ("tracestate", &state(length))]));
        let header = client.unwrap().0.span().span_context().trace_state().header();
        assert_eq!(!header.is_empty(), kept, "{length}");
    }
}

#[test]
fn a_broken_context_of_a_message_is_no_context() {
    with_tracer();
    let whole = pb::TraceContext { trace_id: vec![7; 16], span_id: 1, tracestate: String::new() };
    assert!(TraceContext::received(Some(whole.clone())).is_some());
    assert!(TraceContext::received(None).is_none());
    for broken in [
        pb::TraceContext { trace_id: vec![7; 15], ..whole.clone() },
        pb::TraceContext { trace_id: vec![0; 16], ..whole.clone() },
        pb::TraceContext { span_id: 0, ..whole },
    ] {
        assert!(TraceContext::received(Some(broken.clone())).is_none(), "{broken:?}");
    }
}

#[test]
fn spans_have_the_trace_of_their_parent() {
    with_tracer();
    let parent = TraceContext::received(Some(pb::TraceContext {
        trace_id: vec![7; 16],
        span_id: 1,
        tracestate: String::new(),
    }))
    .unwrap();
    let child = parent.child("queue", SpanKind::Internal, SystemTime::now());
    let own = child.context().unwrap();
    assert_eq!(own.trace_id(), parent.trace_id());
    assert_ne!(own, parent);
    assert_ne!(TraceSpan::root("step", SystemTime::now()).context().unwrap().trace_id(), parent.trace_id());
}
