//! An exporter that says when spans stop reaching the collector, and when they reach it again.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use opentelemetry_sdk::{
    Resource,
    error::OTelSdkResult,
    trace::{SpanData, SpanExporter},
};

/// An exporter whose changes between success and failure are logged. The library itself logs no failed export.
#[derive(Debug)]
pub(super) struct Reported<E> {
    exporter: E,
    collector: String,
    has_failed: AtomicBool,
}

/// A change between two exports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    /// Spans no longer reach the collector.
    Lost,
    /// Spans reach the collector again.
    Back,
}

impl<E> Reported<E> {
    /// An exporter to the collector at this address.
    pub fn new(exporter: E, collector: String) -> Self {
        Self { exporter, collector, has_failed: AtomicBool::new(false) }
    }

    fn report(&self, result: &OTelSdkResult) {
        let collector = &self.collector;
        match (self.change(result), result) {
            (Some(Change::Lost), Err(error)) => {
                tracing::warn!(collector, %error, "spans do not reach the collector and are lost");
            }
            (Some(Change::Back), _) => tracing::info!(collector, "spans reach the collector again"),
            _ => {}
        }
    }

    /// Records the outcome of an export. Returns the change from the outcome before it. The first export changes only
    /// if it fails.
    fn change(&self, result: &OTelSdkResult) -> Option<Change> {
        match (result, self.has_failed.swap(result.is_err(), Ordering::Relaxed)) {
            (Err(_), false) => Some(Change::Lost),
            (Ok(()), true) => Some(Change::Back),
            _ => None,
        }
    }
}

impl<E: SpanExporter> SpanExporter for Reported<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let result = self.exporter.export(batch).await;
        self.report(&result);
        result
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

#[cfg(test)]
mod tests;
