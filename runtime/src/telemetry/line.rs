//! The form of a log line. Each line names its process, and of a worker its rank. In JSON, a line is one object, and a
//! field has the type with which the code gives it: a number is a number.

use std::fmt;

use serde_json::{Map, Value};
use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{
    fmt::{
        FmtContext, FormatEvent, FormatFields, FormattedFields,
        format::{Format, Full, Writer},
        time::{FormatTime, SystemTime},
    },
    registry::LookupSpan,
};
use tutti_proto::GraphKey;

use super::style::LogName;
use crate::{
    request_id::{XRequestId, of_graph},
    trace::TRACE_ID,
};

/// The field by which a worker's lines name a graph.
const KEY: &str = "key";

/// Lines for people.
pub(super) struct TextLines {
    name: LogName,
    rest: Format<Full, ()>,
}

impl TextLines {
    pub fn new(name: LogName) -> Self {
        let rest = tracing_subscriber::fmt::format().without_time().with_level(false).with_target(false);
        Self { name, rest }
    }
}

impl<S, N> FormatEvent<S, N> for TextLines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let has_colours = writer.has_ansi_escapes();
        let (dim, plain) = if has_colours { ("\x1b[2m", "\x1b[0m") } else { ("", "") };
        writer.write_str(dim)?;
        SystemTime.format_time(&mut writer)?;
        let level = *event.metadata().level();
        let colour = if has_colours { colour(level) } else { "" };
        write!(writer, "{plain} {colour}{level:>5}{plain} {dim}{}:{plain} ", self.name)?;
        let mut fields = Fields::default();
        event.record(&mut fields);
        if let Some(id) = fields.id_of_graph() {
            write!(writer, "{dim}{}={plain}{id} ", XRequestId::FIELD)?;
        }
        self.rest.format_event(context, writer, event)
    }
}

fn colour(level: Level) -> &'static str {
    match level {
        Level::TRACE => "\x1b[35m",
        Level::DEBUG => "\x1b[34m",
        Level::INFO => "\x1b[32m",
        Level::WARN => "\x1b[33m",
        Level::ERROR => "\x1b[31m",
    }
}

/// Lines for programs.
pub(super) struct JsonLines {
    pub name: LogName,
}

impl<S, N> FormatEvent<S, N> for JsonLines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let metadata = event.metadata();
        let mut line = self.name.line(*metadata.level())?;
        let mut fields = Fields::default();
        event.record(&mut fields);
        let id_of_graph = fields.id_of_graph();
        for (name, value) in fields.0 {
            line.entry(name).or_insert(value);
        }
        line.insert("target".into(), metadata.target().into());
        let spans: Vec<Value> = context
            .event_scope()
            .into_iter()
            .flat_map(|scope| scope.from_root())
            .map(|span| {
                let mut object = Map::new();
                object.insert("name".into(), span.name().into());
                let fields = span.extensions();
                let fields = fields.get::<FormattedFields<N>>().map(|fields| fields.as_str());
                // A span whose fields are not JSON, or that has none, has its name alone.
                if let Some(Ok(Value::Object(fields))) = fields.map(serde_json::from_str) {
                    object.extend(fields);
                }
                Value::Object(object)
            })
            .collect();
        for shared in [XRequestId::FIELD, TRACE_ID] {
            let of_span = spans.iter().rev().find_map(|span| span.get(shared)).cloned();
            if let Some(value) = of_span.filter(|_| !line.contains_key(shared)) {
                line.insert(shared.into(), value);
            }
        }
        if let Some(id) = id_of_graph {
            line.entry(XRequestId::FIELD).or_insert(id.as_str().into());
        }
        if let Some(last) = spans.last().cloned() {
            line.insert("span".into(), last);
            line.insert("spans".into(), spans.into());
        }
        let line = serde_json::to_string(&line).map_err(|_| fmt::Error)?;
        writeln!(writer, "{line}")
    }
}

/// The fields of one event, in order.
#[derive(Default)]
struct Fields(Map<String, Value>);

impl Fields {
    fn put(&mut self, field: &Field, value: impl Into<Value>) {
        self.0.insert(field.name().into(), value.into());
    }

    /// The id of the request to which the graph belongs that the event names.
    fn id_of_graph(&self) -> Option<XRequestId> {
        of_graph(GraphKey::parse(self.0.get(KEY)?.as_str()?)?)
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.put(field, format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, value);
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.put(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, value);
    }
}

#[cfg(test)]
mod tests;
