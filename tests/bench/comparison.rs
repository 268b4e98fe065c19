//! One workload under several ways to run it, and how many times better some are than others.

use std::fmt::Debug;

use serde::Serialize;
use serde_json::{Map, Value, json};

use tutti_measure::statistics::median;

use crate::way::Way;

/// A figure that ways are compared by.
#[derive(Clone, Copy, Debug)]
pub struct Figure {
    pub name: &'static str,
    pub value: f64,
    pub better: Better,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    Lower,
    Higher,
}

/// What one run of a workload found.
pub trait Run: Debug + Serialize {
    /// The same ones, in the same order, of every run.
    fn figures(&self) -> Vec<Figure>;
}

/// Runs the workload so many times in each way, and sets every other way's medians against those of `bases`. The ways take
/// turns, forwards and backwards, so that a machine that warms up or is disturbed favours none.
pub async fn compare<R: Run>(
    ways: &[Way],
    bases: &[&str],
    repeats: usize,
    run: impl AsyncFn(&Way, usize) -> Result<R, String>,
) -> Result<Value, String> {
    let mut runs: Vec<Vec<R>> = ways.iter().map(|_| Vec::new()).collect();
    for repeat in 0..repeats {
        for turn in 0..ways.len() {
            let place = if repeat % 2 == 0 { turn } else { ways.len() - 1 - turn };
            let name = ways[place].name;
            let found = run(&ways[place], repeat).await.map_err(|doubt| format!("{name}: {doubt}"))?;
            eprintln!("{name} {repeat}: {found:.1?}");
            runs[place].push(found);
        }
    }
    let medians: Vec<Vec<Figure>> = runs.iter().map(|runs| medians(runs)).collect();
    let of_ways = ways.iter().zip(&runs).zip(&medians).map(|((way, runs), medians)| {
        let medians: Map<_, _> =
            medians.iter().map(|figure| (figure.name.into(), json!(figure.value))).collect();
        let found = json!({ "flags": way.flags, "samples": runs.len(), "medians": medians, "runs": runs });
        (way.name.to_owned(), found)
    });
    let of_ways: Map<_, _> = of_ways.collect();
    let named = || ways.iter().map(|way| way.name).zip(&medians);
    let mut ratios = Map::new();
    for (base, base_of) in named().filter(|(name, _)| bases.contains(name)) {
        for (name, of) in named().filter(|(name, _)| !bases.contains(name)) {
            ratios.insert(format!("{name} over {base}"), times_better(of, base_of));
        }
    }
    Ok(json!({ "times_better": ratios, "ways": of_ways }))
}

fn medians<R: Run>(runs: &[R]) -> Vec<Figure> {
    let all: Vec<Vec<Figure>> = runs.iter().map(Run::figures).collect();
    let Some(first) = all.first() else { return Vec::new() };
    let of = |place: usize| median(all.iter().map(|figures| figures[place].value));
    first.iter().enumerate().map(|(place, figure)| Figure { value: of(place), ..*figure }).collect()
}

fn times_better(of: &[Figure], base: &[Figure]) -> Value {
    let ratio = |(of, base): (&Figure, &Figure)| match of.better {
        Better::Lower => base.value / of.value,
        Better::Higher => of.value / base.value,
    };
    of.iter().zip(base).map(|pair| (pair.0.name.to_owned(), json!(ratio(pair)))).collect::<Map<_, _>>().into()
}
