//! `cargo bench --bench control_plane`: the latency that conductor, router and eight simulated workers add to that of
//! the device, and their capacity. The baseline is another project's router in front of servers that only stream.
//!
//! All contenders have the same client and share the machine's cores with it, so the client's CPU time is part of the
//! figures. Contenders take turns at each load.

mod support {
    pub mod backends;
    pub mod baseline;
    pub mod cluster;
    pub mod contender;
    pub mod large_bodies;
    pub mod many_streams;
    pub mod small_requests;
}

use std::process::ExitCode;

use clap::Parser;
use serde_json::{Map, Value, json};
use tutti_measure::results::{self, Origin};

use support::{
    backends, baseline,
    contender::{Contender, Kind, WORKERS},
    large_bodies::{self, Form, LargeBodies},
    many_streams::{self, Level},
    small_requests::{self, SmallRequests},
};

/// Numbers of concurrent streams. Each is about a quarter more than the one before.
const LEVELS: [usize; 11] = [96, 128, 160, 200, 256, 320, 400, 512, 640, 800, 1000];
/// Runs per level. A level counts as passed if one run stays within the latency bound, because other processes may
/// disturb a run.
const TRIES: usize = 2;

#[derive(Parser)]
struct Args {
    /// Load to measure [default: all].
    #[arg(long, value_enum)]
    only: Option<Load>,
    /// Do not measure the baseline.
    #[arg(long)]
    alone: bool,
    #[command(flatten)]
    output: results::Output,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Load {
    ManyStreams,
    SmallRequests,
    LargeBodies,
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
    let is_asked = |load| args.only.is_none_or(|only| only == load);
    let kinds: &[Kind] = if args.alone { &[Kind::Tutti] } else { &[Kind::Tutti, Kind::SglangRouter] };
    let mut figures = json!({
        "workers": WORKERS,
        "baseline": { "package": baseline::PACKAGE, "policy": baseline::POLICY, "backends": WORKERS },
        "shared": "client, servers and simulated devices share the machine's cores",
    });
    if is_asked(Load::ManyStreams) {
        figures["many_streams"] = many_streams(kinds).await?;
    }
    if is_asked(Load::SmallRequests) {
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
    if is_asked(Load::LargeBodies) {
        figures["large_bodies"] = large_bodies(kinds).await?;
    }
    results::write(&origin, figures, &args.output)
}

/// Finds the highest throughput at which tokens still arrive evenly. Raises the number of streams until tokens arrive
/// unevenly.
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

async fn large_bodies(kinds: &[Kind]) -> Result<Value, String> {
    let mut forms = Map::new();
    for form in [Form::TokenIds, Form::Text] {
        let mut found = Map::new();
        // The baseline takes only text prompts.
        let kinds = if form == Form::Text { kinds } else { &[Kind::Tutti] };
        for &kind in kinds {
            let contender = Contender::start(kind, large_bodies::STEP).await?;
            let of = LargeBodies::measure(&contender, form).await?;
            contender.stop()?;
            eprintln!("large bodies as {}, {}: {of:.1?}", form.name(), kind.name());
            found.insert(kind.name().into(), json!(of));
        }
        forms.insert(form.name().into(), Value::Object(found));
    }
    let (streams, bytes, aim) = (large_bodies::STREAMS, large_bodies::BYTES, large_bodies::AIM_MS);
    Ok(json!({ "streams": streams, "prompt_bytes": bytes, "aim_ms_p99": aim, "found": forms }))
}
