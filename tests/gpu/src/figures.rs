//! Benches: milliseconds of prefills and decodes, at the shapes of real models with dummy weights.

use std::fs;

use serde_json::Value;

use crate::Bundle;
use crate::child;
use crate::report::Report;

/// Model shapes in the bundle, smallest first.
const SHAPES: [&str; 2] = ["qwen3-0.6b", "qwen3-8b"];
/// Shape and steps of a short run.
const SHORT_SHAPE: &str = "small";
const SHORT_STEPS: &str = "prefill-512,decode-1,decode-8";

fn run_shape(bundle: &Bundle, report: &mut Report, shape: &str) {
    let json = bundle.path(&format!("{shape}.json"));
    let mut bench = child::command(bundle, "forward");
    bench
        .args(["--device", "cuda", "--model"])
        .arg(bundle.path("shapes").join(shape))
        .arg("--json")
        .arg(&json);
    if bundle.short {
        bench.args(["--only", SHORT_STEPS, "--rounds", "1", "--times", "2"]);
    }
    let ended = child::run(bundle, bench, shape);
    let figures: Option<Value> = fs::read(&json).ok().and_then(|text| serde_json::from_slice(&text).ok());
    println!("{}", ended.text.trim_end());
    report.check("benches", shape, ended.well && figures.is_some(), &ended.tail());
    if let Some(mut figures) = figures {
        report.device(figures["device"].as_str().unwrap_or_default());
        figures["shape"] = shape.into();
        report.figures(figures);
    }
}

pub fn run(bundle: &Bundle, report: &mut Report) {
    let shapes: &[&str] = if bundle.short { &[SHORT_SHAPE] } else { &SHAPES };
    shapes.iter().for_each(|shape| run_shape(bundle, report, shape));
}
