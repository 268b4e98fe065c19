//! `cargo bench --bench soak`: sends a million requests, and checks that no process grows.
//!
//! Half of the requests go to a conductor's own router, half to a router process in front of the same conductor. Most
//! are short. Some send text, some are refused, and some clients disconnect in the middle of their stream. Memory and
//! descriptors of every process are read at fixed intervals, and averaged over each tenth of the requests. The prefix
//! cache is small, so that the warm-up fills it. A cache that is still filling would look like a leak.

mod support {
    pub mod cluster;
}

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    process::{Child, Command, ExitCode, Stdio},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use clap::Parser;
use serde::Serialize;
use serde_json::json;
use tokio::{sync::Notify, task::JoinSet, time::interval};
use tutti_load::{client::Target, plan::Workload};
use tutti_measure::results::{self, Origin};

use support::cluster::{Cluster, free_port, wait_until_ready};

/// Number of clients. Each has one request in progress.
const CLIENTS: usize = 48;
/// Maximum growth of memory or descriptors, as a share of the first tenth's average.
const GOAL_GROWTH: f64 = 0.05;
const READING: Duration = Duration::from_millis(200);
const WORKERS: usize = 2;

#[derive(Parser)]
struct Args {
    /// Number of requests that count.
    #[arg(long, default_value_t = 1_000_000)]
    requests: usize,
    /// Number of requests before those that count.
    #[arg(long, default_value_t = 100_000)]
    warm_up: usize,
    #[command(flatten)]
    output: results::Output,
}

/// Kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    /// Sends token ids and reads the whole stream.
    Ids,
    /// Sends text and reads the whole stream.
    Text,
    /// Disconnects after the first token.
    Leaves,
    /// Asks for more tokens than the model's context has, and is refused.
    Refused,
}

impl Kind {
    fn of(index: usize) -> Self {
        match index % 100 {
            0 => Self::Leaves,
            1 => Self::Refused,
            rest if rest % 8 == 2 => Self::Text,
            _ => Self::Ids,
        }
    }
}

/// Memory in bytes, and the number of open descriptors, of one process.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Use {
    resident_bytes: f64,
    descriptors: f64,
}

/// A reading of all processes, with the number of requests answered so far.
struct Reading {
    answered: usize,
    processes: Vec<Use>,
}

#[derive(Debug, Serialize)]
struct Process {
    name: String,
    first_tenth: Use,
    last_tenth: Use,
    /// Growth of memory from the first to the last tenth, as a share.
    memory_growth: f64,
    descriptor_growth: f64,
    /// Resident bytes on average over each tenth of the requests.
    resident_bytes_by_tenth: Vec<f64>,
}

struct Router(Child);

impl Drop for Router {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    results::exit("soak", measure(Args::parse()).await)
}

async fn measure(args: Args) -> Result<(), String> {
    let origin = Origin::now("soak");
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (cluster_port, secret) = (free_port()?, dir.join("soak-secret"));
    write(&secret, "a secret of the soak, long enough\n")?;
    let settings = dir.join("soak.toml");
    write(
        &settings,
        &format!(
            "workers = {WORKERS}\ndevice = \"sim\"\nmodel = {:?}\nkv_cache_memory = \"2MiB\"\n[sim]\nprofile = \"instant\"\n",
            Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tutti-tiny/checkpoint")
        ),
    )?;
    let token_file = format!("--cluster-token-file={}", secret.display());
    let config = format!("--config={}", settings.display());
    let cluster_grpc = format!("--cluster-grpc=127.0.0.1:{cluster_port}");
    let cluster = Cluster::start(&[config, cluster_grpc, token_file.clone()]).await?;
    let (router, routed) = start_router(cluster_port, &token_file).await?;

    let workers = cluster.workers()?;
    let mut processes =
        vec![("conductor".to_owned(), cluster.conductor()), ("router".to_owned(), router.0.id())];
    processes.extend(workers.iter().enumerate().map(|(rank, pid)| (format!("worker {rank}"), *pid)));
    let targets = [cluster.target.clone(), routed];
    eprintln!("warm-up: {} requests", args.warm_up);
    send(&targets, args.warm_up, 0, Arc::default()).await?;

    let answered = Arc::<AtomicUsize>::default();
    let pids: Vec<u32> = processes.iter().map(|(_, pid)| *pid).collect();
    let readings = tokio::spawn(read_all(pids, answered.clone(), args.requests));
    let began = Instant::now();
    let kinds = send(&targets, args.requests, args.warm_up, answered).await?;
    let seconds = began.elapsed().as_secs_f64();
    let readings = readings.await.map_err(|e| format!("the readings failed: {e}"))??;
    if cluster.workers()? != workers {
        return Err("a worker has ended and was started again".into());
    }
    let found: Vec<Process> = processes
        .into_iter()
        .enumerate()
        .map(|(index, (name, _))| process(name, index, &readings, args.requests))
        .collect();
    for process in &found {
        eprintln!("{process:.3?}");
    }
    let worst = found.iter().map(|p| p.memory_growth.max(p.descriptor_growth)).fold(f64::MIN, f64::max);
    drop(router);
    cluster.stop()?;
    let figures = json!({
        "goal_growth": GOAL_GROWTH, "largest_growth": worst, "requests": args.requests, "warm_up": args.warm_up,
        "seconds": seconds, "requests_per_s": args.requests as f64 / seconds, "kinds": kinds, "processes": found,
    });
    results::write(&origin, figures, &args.output)
}

fn write(file: &Path, text: &str) -> Result<(), String> {
    fs::write(file, text).map_err(|e| format!("{}: {e}", file.display()))
}

/// Starts a router in front of the conductor whose cluster port is given.
async fn start_router(cluster_port: u16, token_file: &str) -> Result<(Router, Target), String> {
    let (http, grpc) = (free_port()?, free_port()?);
    let log = Path::new(env!("CARGO_TARGET_TMPDIR")).join("soak-router.log");
    let log = fs::File::create(&log).map_err(|e| format!("{}: {e}", log.display()))?;
    let router = Command::new(env!("CARGO_BIN_EXE_router"))
        .args([format!("--conductor=http://127.0.0.1:{cluster_port}"), token_file.to_owned()])
        .args([format!("--http=127.0.0.1:{http}"), format!("--grpc=127.0.0.1:{grpc}")])
        .stdin(Stdio::null())
        .stderr(log)
        .spawn()
        .map_err(|e| format!("the router does not start: {e}"))?;
    let router = Router(router);
    let target = wait_until_ready(&format!("http://127.0.0.1:{http}"), Instant::now()).await?;
    Ok((router, target))
}

/// Sends requests from all clients. Returns the number of requests of each kind. `first` is the index of the first
/// request.
async fn send(
    targets: &[Target; 2],
    requests: usize,
    first: usize,
    answered: Arc<AtomicUsize>,
) -> Result<BTreeMap<String, usize>, String> {
    let next = Arc::<AtomicUsize>::default();
    let mut clients: JoinSet<Result<BTreeMap<Kind, usize>, String>> = JoinSet::new();
    for client in 0..CLIENTS {
        let (target, next, answered) = (targets[client % 2].clone(), next.clone(), answered.clone());
        clients.spawn(async move {
            let mut kinds = BTreeMap::new();
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= requests {
                    return Ok(kinds);
                }
                let kind = Kind::of(index);
                request(&target, kind, (first + index) as u64).await?;
                *kinds.entry(kind).or_insert(0) += 1;
                answered.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    let mut all = BTreeMap::new();
    for kinds in clients.join_all().await {
        for (kind, times) in kinds? {
            *all.entry(format!("{kind:?}").to_lowercase()).or_insert(0) += times;
        }
    }
    Ok(all)
}

/// Sends one request. Fails unless the outcome is as expected for the kind.
async fn request(target: &Target, kind: Kind, seed: u64) -> Result<(), String> {
    let plan = Workload {
        requests: 1,
        rate: f64::INFINITY,
        prompt_tokens: (4, 48),
        max_tokens: 1,
        vocab_size: 256,
        seed,
    };
    let prompt = plan.plan().remove(0).prompt;
    let tokens = 1 + (seed % 4) as u32;
    let failure = match kind {
        Kind::Ids => target.generate(&prompt, tokens, seed).await.failure,
        Kind::Text => {
            let text = format!(
                "Request {seed} asks for {tokens} tokens. Which instrument gives the note to tune by?"
            );
            target.send(target.body(text, tokens, seed), tokens, |_| {}).await.failure
        }
        Kind::Leaves => {
            let first = Notify::new();
            let stream = target.generate_watched(&prompt, 512, seed, |record| {
                if !record.arrivals.is_empty() {
                    first.notify_one();
                }
            });
            tokio::select! {
                record = stream => record.failure,
                () = first.notified() => None,
            }
        }
        Kind::Refused => match target.generate(&prompt, 1_000_000, seed).await.failure {
            Some(why) if why.starts_with("status 400") => None,
            Some(why) => Some(why),
            None => Some("a request for a million tokens was not refused".into()),
        },
    };
    failure.map_or(Ok(()), |why| Err(format!("{kind:?} {seed}: {why}")))
}

/// Reads all processes until all requests are answered.
async fn read_all(
    pids: Vec<u32>,
    answered: Arc<AtomicUsize>,
    requests: usize,
) -> Result<Vec<Reading>, String> {
    let (mut readings, mut ticks) = (Vec::new(), interval(READING));
    loop {
        ticks.tick().await;
        let processes = pids.iter().map(|pid| read(*pid)).collect::<Result<_, _>>()?;
        let answered = answered.load(Ordering::Relaxed);
        readings.push(Reading { answered, processes });
        if answered >= requests {
            return Ok(readings);
        }
    }
}

fn read(pid: u32) -> Result<Use, String> {
    let failed = |e: std::io::Error| format!("process {pid}: {e}");
    let status = fs::read_to_string(format!("/proc/{pid}/status")).map_err(failed)?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib: Option<f64> = line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse().ok());
    let resident_bytes = kib.ok_or_else(|| format!("process {pid}: no VmRSS"))? * 1024.0;
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).map_err(failed)?.count() as f64;
    Ok(Use { resident_bytes, descriptors })
}

/// Averages the readings of one process over each tenth of the requests.
fn process(name: String, index: usize, readings: &[Reading], requests: usize) -> Process {
    let mean = |within: &dyn Fn(usize) -> bool| {
        let uses: Vec<Use> =
            readings.iter().filter(|r| within(r.answered)).map(|r| r.processes[index]).collect();
        let number = uses.len().max(1) as f64;
        Use {
            resident_bytes: uses.iter().map(|u| u.resident_bytes).sum::<f64>() / number,
            descriptors: uses.iter().map(|u| u.descriptors).sum::<f64>() / number,
        }
    };
    let tenths: Vec<Use> =
        (0..10).map(|tenth| mean(&|answered| (answered * 10 / requests).min(9) == tenth)).collect();
    let (first_tenth, last_tenth) = (tenths[0], tenths[9]);
    Process {
        name,
        first_tenth,
        last_tenth,
        resident_bytes_by_tenth: tenths.iter().map(|tenth| tenth.resident_bytes).collect(),
        memory_growth: last_tenth.resident_bytes / first_tenth.resident_bytes - 1.0,
        descriptor_growth: last_tenth.descriptors / first_tenth.descriptors - 1.0,
    }
}
