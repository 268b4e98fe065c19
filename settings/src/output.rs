//! Logs, spans and traces.

use std::path::PathBuf;

settings! {
    /// The step trace of each worker.
    pub struct TraceSettings {
        "Output" => {
            /// File for one JSON line per step; each worker adds its rank to the name, as in FILE.rank0
            trace_steps: Option<PathBuf> = None, unit "FILE";
        }
    }
}

settings! {
    /// Logs of a process, and the collector of its spans.
    pub struct TelemetrySettings {
        "Output" => {
            /// Format of log lines
            log_format: LogFormat = LogFormat::Text;
            /// Filter of log lines, such as info or tutti_worker=debug
            log: String = "info".into(), unit "FILTER", changes live;
            /// OTLP/gRPC collector of spans, such as http://host:4317
            otlp_endpoint: Option<String> = None, unit "URL";
        }
    }
}

settings! {
    /// The names of metrics.
    pub struct MetricsSettings {
        "Output" => {
            /// Serve some metrics under the names of vLLM, too, for dashboards that exist
            vllm_metrics: bool = false;
        }
    }
}

choices! {
    /// The format of log lines.
    pub enum LogFormat {
        /// Lines for people.
        Text = "text",
        /// One JSON object per line.
        Json = "json",
    }
}
