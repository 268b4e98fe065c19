//! The report as one HTML page, which loads no other file.

use std::fmt::Write;

use serde_json::Value;

use crate::{
    histogram::Summary,
    plot::{Series, escape, histogram, number, over_time},
    report::Report,
    timeline::Interval,
};

const STYLE: &str = "
:root{color-scheme:light dark;--ink:#1c2024;--soft:#5b6570;--paper:#fff;--panel:#f5f6f8;--grid:#dde1e6;--a:#2563c9;--b:#b4540a;--c:#b3261e}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ec;--soft:#a2abb5;--paper:#14171a;--panel:#1d2125;--grid:#363d44;--a:#78a9ff;--b:#f0a05a;--c:#ff8a80}}
body{margin:0 auto;padding:1.5rem;max-width:90rem;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.4rem;margin:0}h2{font-size:1.05rem;margin:1.6rem 0 .5rem}p{margin:.3rem 0;color:var(--soft)}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,32rem),1fr));gap:1rem}
figure{margin:0;padding:.8rem;background:var(--panel);border-radius:.5rem}figcaption{font-weight:600;margin-bottom:.3rem}
svg{width:100%;height:auto;display:block}svg text{fill:var(--soft);font:11px system-ui,sans-serif}
.grid{stroke:var(--grid)}.bar{fill:var(--a)}.mark{stroke:var(--b);stroke-dasharray:4 3}
path,circle,line.a,line.b,line.c{fill:none;stroke-width:2;stroke-linejoin:round}
.a{stroke:var(--a)}.b{stroke:var(--b)}.c{stroke:var(--c)}
.cards{display:flex;flex-wrap:wrap;gap:.8rem;margin:1rem 0}.card{background:var(--panel);border-radius:.5rem;padding:.5rem 1rem}
.card b{display:block;font-size:1.25rem}.card span{color:var(--soft)}
.scroll{overflow-x:auto}table{border-collapse:collapse}th,td{padding:.25rem .9rem .25rem 0;text-align:right;border-bottom:1px solid var(--grid);font-variant-numeric:tabular-nums}
th:first-child,td:first-child,.left td,.left th{text-align:left}td{overflow-wrap:anywhere}
.warning{color:var(--c);font-weight:600}pre{white-space:pre-wrap;overflow-wrap:anywhere;background:var(--panel);padding:.8rem;border-radius:.5rem}
";

/// The page of a report.
pub fn page(report: &Report) -> String {
    let mut page = String::new();
    let title = escape(&format!("{} at {}", report.target.model, report.target.url));
    let mut put = |text: String| page.push_str(&text);
    put(format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>tutti-bench: {title}</title>\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\"><style>{STYLE}</style></head><body><main>\n"
    ));
    put(format!(
        "<h1>{title}</h1><p>{} · tutti-bench {}</p>",
        escape(&report.started),
        escape(report.version)
    ));
    for warning in &report.warnings {
        put(format!("<p class=\"warning\">{}</p>", escape(warning)));
    }
    put(cards(report));
    put(latency_table(report));
    put("<h2>Distribution of latencies</h2><div class=\"plots\">".into());
    for (name, summary) in report.latencies() {
        put(distribution(name, summary));
    }
    put("</div><h2>Course of the run</h2><div class=\"plots\">".into());
    put(course(report));
    put("</div>".into());
    put(failures(report));
    put(facts(report));
    put("</main></body></html>\n".into());
    page
}

fn cards(report: &Report) -> String {
    let mut cards = vec![
        ("requests served", format!("{} of {}", report.requests.served, report.requests.sent)),
        ("seconds", format!("{:.1}", report.duration_s)),
        ("requests per second", format!("{:.2}", report.throughput.requests_per_s)),
        ("output tokens per second", format!("{:.1}", report.throughput.output_tokens_per_s)),
        ("prompt tokens per second", format!("{:.1}", report.throughput.prompt_tokens_per_s)),
    ];
    let bounds = [("TTFT", report.goodput.slo_ttft_ms), ("ITL", report.goodput.slo_itl_ms)];
    let bounds: Vec<String> =
        bounds.iter().filter_map(|(name, ms)| ms.map(|ms| format!("{name} ≤ {} ms", number(ms)))).collect();
    let within = format!("requests per second within {}", bounds.join(", "));
    if !bounds.is_empty() {
        let good = &report.goodput;
        cards.push((&within, format!("{:.2} ({:.1} %)", good.requests_per_s, good.share * 100.0)));
    }
    let card = |(name, value): &(&str, String)| {
        format!("<div class=\"card\"><b>{}</b><span>{}</span></div>", escape(value), escape(name))
    };
    format!("<div class=\"cards\">{}</div>", cards.iter().map(card).collect::<String>())
}

fn latency_table(report: &Report) -> String {
    let mut rows = String::new();
    let send_delay = ("sending after due", &report.latency.send_delay_ms);
    for (name, s) in report.latencies().into_iter().chain([send_delay]) {
        let figures = [s.mean, s.min, s.p50, s.p90, s.p95, s.p99, s.p999, s.max];
        let cells: String = figures.iter().map(|ms| format!("<td>{ms:.2}</td>")).collect();
        let _ = write!(rows, "<tr><th scope=\"row\">{name}</th><td>{}</td>{cells}</tr>", s.count);
    }
    let heads = ["ms", "samples", "mean", "min", "p50", "p90", "p95", "p99", "p99.9", "max"];
    let heads: String = heads.iter().map(|head| format!("<th scope=\"col\">{head}</th>")).collect();
    format!("<h2>Latency</h2><div class=\"scroll\"><table><tr>{heads}</tr>{rows}</table></div>")
}

fn figure(caption: &str, svg: &str) -> String {
    format!("<figure><figcaption>{}</figcaption>{svg}</figure>", escape(caption))
}

fn distribution(name: &str, summary: &Summary) -> String {
    let caption = match name {
        "TTFT" => "TTFT: from the due time to the first token",
        "ITL" => "ITL: from tokens to the next tokens",
        "TPOT" => "TPOT: mean time per token after the first",
        _ => "E2E: from the due time to the end of the answer",
    };
    let marks = [("p50", summary.p50), ("p90", summary.p90), ("p99", summary.p99)];
    figure(caption, &histogram(caption, &summary.buckets, &marks))
}

fn course(report: &Report) -> String {
    let width = report.interval_s;
    // The last interval may be cut short by the end of the run.
    let length = |i: &Interval| (report.duration_s - i.start_s).clamp(width / 100.0, width);
    let middle = |i: &Interval| i.start_s + length(i) / 2.0;
    let per_s = |value: fn(&Interval) -> u64| {
        report.timeline.iter().map(|i| (middle(i), Some(value(i) as f64 / length(i)))).collect::<Vec<_>>()
    };
    let plain = |value: fn(&Interval) -> Option<f64>| {
        report.timeline.iter().map(|i| (middle(i), value(i))).collect::<Vec<_>>()
    };
    let plot =
        |caption: &str, series: &[Series]| figure(caption, &over_time(caption, report.duration_s, series));
    let series = |name, class, points| Series { name, class, points };
    [
        plot("Output tokens per second", &[series("tokens", "a", per_s(|i| i.output_tokens))]),
        plot(
            "Requests per second",
            &[
                series("sent", "b", per_s(|i| i.sent)),
                series("served", "a", per_s(|i| i.served)),
                series("failed", "c", per_s(|i| i.failed)),
            ],
        ),
        plot("Requests in flight", &[series("most at once", "a", plain(|i| Some(i.max_in_flight as f64)))]),
        plot(
            "TTFT in ms, by the time of the token",
            &[
                series("mean", "a", plain(|i| i.ttft_mean_ms)),
                series("longest", "b", plain(|i| i.ttft_max_ms)),
            ],
        ),
    ]
    .concat()
}

fn failures(report: &Report) -> String {
    if report.failures.is_empty() {
        return String::new();
    }
    let mut rows = String::new();
    for failures in &report.failures {
        let (kind, example) = (escape(&failures.kind), escape(&failures.example));
        let _ = write!(rows, "<tr><td>{kind}</td><td>{}</td><td>{example}</td></tr>", failures.count);
    }
    format!(
        "<h2>Failures</h2><div class=\"scroll\"><table class=\"left\"><tr><th>kind</th><th>requests</th>\
         <th>first message</th></tr>{rows}</table></div>"
    )
}

fn facts(report: &Report) -> String {
    let pretty = |value: &Value| serde_json::to_string_pretty(value).unwrap_or_default();
    let machine = &report.machine;
    let machine = format!(
        "{}, {} threads, {} GiB, Linux {}, load {}",
        machine.cpu, machine.threads, machine.memory_gib, machine.kernel, machine.load_1m
    );
    let facts = format!(
        "{}\n\nmachine: {machine}\nload: {}\nworkload: {}",
        report.command.join(" "),
        pretty(&report.load),
        pretty(&report.workload)
    );
    format!("<h2>How it was measured</h2><pre>{}</pre>", escape(&facts))
}
