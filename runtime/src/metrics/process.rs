//! Metrics of this process, under the names that Prometheus's client libraries give them.

use std::fmt;

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeGaugeValue, EncodeMetric},
    metrics::{counter::ConstCounter, gauge::ConstGauge},
};

use super::Metrics;
use crate::process_usage;

impl Metrics {
    /// Registers the metrics of this process. They are read at each scrape.
    pub fn show_process(&self) {
        self.register_conventional(|registry| registry.register_collector(Box::new(ProcessMetrics)));
    }
}

#[derive(Debug)]
struct ProcessMetrics;

impl Collector for ProcessMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        let usage = process_usage::read();
        let seconds = |us: u64| us as f64 / 1e6;
        if let Some(us) = usage.cpu_us {
            let cpu = ConstCounter::new(seconds(us));
            let help = "Seconds of processors, of all threads since the process began";
            cpu.encode(encoder.encode_descriptor("process_cpu_seconds", help, None, cpu.metric_type())?)?;
        }
        let bytes = usage.resident_bytes.map(|bytes| bytes as i64);
        gauge(&mut encoder, "process_resident_memory_bytes", "Bytes of memory that the process has", bytes)?;
        let open = usage.open_descriptors.map(|open| open as i64);
        gauge(&mut encoder, "process_open_fds", "Open descriptors of files and sockets", open)?;
        // A limit that the system does not set is as large as a number can be.
        let most = usage.max_descriptors.map(|most| i64::try_from(most).unwrap_or(i64::MAX));
        gauge(&mut encoder, "process_max_fds", "Descriptors that the process may have open", most)?;
        let started = usage.started_us.map(seconds);
        gauge(&mut encoder, "process_start_time_seconds", "Unix time at which the process began", started)
    }
}

fn gauge(
    encoder: &mut DescriptorEncoder,
    name: &str,
    help: &str,
    value: Option<impl EncodeGaugeValue>,
) -> Result<(), fmt::Error> {
    let Some(value) = value else { return Ok(()) };
    let gauge = ConstGauge::new(value);
    gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)
}
