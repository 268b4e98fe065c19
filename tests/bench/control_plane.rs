//! `cargo bench --bench control_plane`: what eight simulated workers, their conductor and its router add to what a device
//! takes, and how much they carry; beside another project's router before servers that only stream.
//!
//! Whoever is measured, the client is the same, and all of them share the machine's cores with it: how much of the CPU
//! time is the client's own is part of the figures. Contenders take turns at each load.

mod backends;
mod cluster;
mod contender;
mod long_prompts;
mod many_streams;
mod rival;
mod small_requests;

use std::process::ExitCode;

use clap::Parser;
use serde_json::{Map, Value, json};
use tutti_measure::results::{self, Origin};

use crate::{
    contender::{Contender, Kind, WORKERS},
    long_prompts::{Form, LongPrompts},
    many_streams::Level,
    small_requests::SmallRequests,
};

/// Streams at a time, each a quarter more than the one before.
const LEVELS: [usize; 11] = [96, 128, 160, 200, 256, 320, 400, 512, 640, 800, 1000];
/// A level is held if one of so many runs of it keeps to the bound: others may use the machine for a moment.
const TRIES: usize = 2;

#[derive(Parser)]
struct Args {
    /// What to measure; all of it where this is not given.
    #[arg(long, value_enum)]
    only: Option<Part>,
    /// Only what this project does.
    #[arg(long)]
    alone: bool,
    #[command(flatten)]
    output: results::Output,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    ManyStreams,
    SmallRequests,
    LongPrompts,
}

fn main() -> ExitCode {
    let measured = backends::serve_if_asked().unwrap_or_else(|| {
        let runtime = tokio::runtime::Runtime::new().map_err(|e| format!("no runtime: {e}"))?;
        runtime.block_on(measure(Args::parse()))
    });
    results::exit("control_plane", measured)
}

async fn measure(args: Args) -> Result<(), String> {
    let origin = Origin::now("control_plane");
    let is_asked = |part| args.only.is_none_or(|only| only == part);
    let kinds: &[Kind] = if args.alone { &[Kind::Tutti] } else { &[Kind::Tutti, Kind::SglangRouter] };
    let mut figures = json!({
        "workers": WORKERS,
        "rival": { "package": rival::PACKAGE, "policy": rival::POLICY, "backends": WORKERS },
        "shared": "client, servers and simulated devices share the machine's cores",
    });
    if is_asked(Part::ManyStreams) {
        figures["many_streams"] = many_streams(kinds).await?;
    }
    if is_asked(Part::SmallRequests) {
        let kinds = if args.alone { kinds } else { &[Kind::Tutti, Kind::SglangRouter, Kind::Nothing] };
        let mut found = Map::new();
        for &kind in kinds {
            let contender = Contender::start(kind, small_requests::STEP).await?;
            let of = SmallRequests::measure(&contender).await?;
            contender.stop()?;
            eprintln!("small requests, {}: {of:.2?}", kind.name());
            found.insert(kind.name().into(), json!(of));
        }
        let (rate, aim) = (small_requests::RATE, small_requests::AIM_MS);
        figures["small_requests"] = json!({ "rate_per_s": rate, "aim_ms_p99": aim, "found": found });
    }
    if is_asked(Part::LongPrompts) {
        figures["long_prompts"] = long_prompts(kinds).await?;
    }
    results::write(&origin, figures, &args.output)
}

/// The most tokens a second before streams become uneven, by going up until they do.
async fn many_streams(kinds: &[Kind]) -> Result<Value, String> {
    let mut contenders = Vec::new();
    for &kind in kinds {
        contenders.push((kind, Contender::start(kind, many_streams::STEP).await?, Vec::<Level>::new(), true));
    }
    for streams in LEVELS {
        for (kind, contender, levels, goes_on) in contenders.iter_mut().filter(|(.., goes_on)| *goes_on) {
            *goes_on = false;
            for _ in 0..TRIES {
                let level = Level::measure(contender, streams).await?;
                eprintln!("{}: {level:.2?}", kind.name());
                *goes_on |= level.holds();
                levels.push(level);
                if *goes_on {
                    break;
                }
            }
        }
    }
    let mut found = Map::new();
    for (kind, contender, levels, _) in contenders {
        contender.stop()?;
        let most = levels.iter().filter(|level| level.holds()).max_by_key(|level| level.streams);
        found.insert(kind.name().into(), json!({ "most": most, "levels": levels }));
    }
    let (step_ms, limit) = (many_streams::STEP.as_secs_f64() * 1e3, many_streams::LIMIT_MS);
    Ok(json!({ "step_ms": step_ms, "limit_ms_p99": limit, "found": found }))
}

async fn long_prompts(kinds: &[Kind]) -> Result<Value, String> {
    let mut forms = Map::new();
    for form in [Form::TokenIds, Form::Text] {
        let mut found = Map::new();
        // The other one takes prompts as text only.
        let kinds = if form == Form::Text { kinds } else { &[Kind::Tutti] };
        for &kind in kinds {
            let contender = Contender::start(kind, long_prompts::STEP).await?;
            let of = LongPrompts::measure(&contender, form).await?;
            contender.stop()?;
            eprintln!("long prompts as {}, {}: {of:.1?}", form.name(), kind.name());
            found.insert(kind.name().into(), json!(of));
        }
        forms.insert(form.name().into(), Value::Object(found));
    }
    let (streams, bytes, aim) = (long_prompts::STREAMS, long_prompts::BYTES, long_prompts::AIM_MS);
    Ok(json!({ "streams": streams, "prompt_bytes": bytes, "aim_ms_p99": aim, "found": forms }))
}
