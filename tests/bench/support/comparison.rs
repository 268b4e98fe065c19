//! One workload under several variants, and the ratios between their figures.

use std::fmt::Debug;

use serde::Serialize;
use serde_json::{Map, Value, json};
use tutti_measure::statistics::median;

use super::variant::Variant;

/// A figure of a run.
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

/// Result of one run of a workload.
pub trait Run: Debug + Serialize {
    /// Figures of the run. Every run has the same figures in the same order.
    fn figures(&self) -> Vec<Figure>;
}

/// Runs the workload `repeats` times in each variant. Returns all figures. For each variant that is not in `bases`,
/// also returns the factor by which its medians are better than those of each base. Variants take turns in alternating
/// order, so that a change of the machine's speed favours none.
pub async fn compare<R: Run>(
    variants: &[Variant],
    bases: &[&str],
    repeats: usize,
    run: impl AsyncFn(&Variant, usize) -> Result<R, String>,
) -> Result<Value, String> {
    let mut runs: Vec<Vec<R>> = variants.iter().map(|_| Vec::new()).collect();
    for repeat in 0..repeats {
        for turn in 0..variants.len() {
            let index = if repeat % 2 == 0 { turn } else { variants.len() - 1 - turn };
            let name = variants[index].name;
            let found = run(&variants[index], repeat).await.map_err(|doubt| format!("{name}: {doubt}"))?;
            eprintln!("{name} {repeat}: {found:.1?}");
            runs[index].push(found);
        }
    }
    let medians: Vec<Vec<Figure>> = runs.iter().map(|runs| medians(runs)).collect();
    let by_variant = variants.iter().zip(&runs).zip(&medians).map(|((variant, runs), medians)| {
        let medians: Map<_, _> =
            medians.iter().map(|figure| (figure.name.into(), json!(figure.value))).collect();
        let found =
            json!({ "flags": variant.flags, "samples": runs.len(), "medians": medians, "runs": runs });
        (variant.name.to_owned(), found)
    });
    let by_variant: Map<_, _> = by_variant.collect();
    let named = || variants.iter().map(|variant| variant.name).zip(&medians);
    let mut ratios = Map::new();
    for (base, base_of) in named().filter(|(name, _)| bases.contains(name)) {
        for (name, of) in named().filter(|(name, _)| !bases.contains(name)) {
            ratios.insert(format!("{name} over {base}"), times_better(of, base_of));
        }
    }
    Ok(json!({ "times_better": ratios, "variants": by_variant }))
}

fn medians<R: Run>(runs: &[R]) -> Vec<Figure> {
    let all: Vec<Vec<Figure>> = runs.iter().map(Run::figures).collect();
    let Some(first) = all.first() else { return Vec::new() };
    let of = |index: usize| median(all.iter().map(|figures| figures[index].value));
    first.iter().enumerate().map(|(index, figure)| Figure { value: of(index), ..*figure }).collect()
}

fn times_better(of: &[Figure], base: &[Figure]) -> Value {
    let ratio = |(of, base): (&Figure, &Figure)| match of.better {
        Better::Lower => base.value / of.value,
        Better::Higher => of.value / base.value,
    };
    of.iter().zip(base).map(|pair| (pair.0.name.to_owned(), json!(ratio(pair)))).collect::<Map<_, _>>().into()
}
