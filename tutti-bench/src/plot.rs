//! Plots as SVG, drawn with the colours of the page's style sheet.

use std::fmt::Write;

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 220.0;
const LEFT: f64 = 56.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 30.0;
/// Maximum number of bars of a histogram. More bars could not be told apart.
const BARS: usize = 70;

/// A line of a plot over time.
pub struct Series {
    /// Name of the line in the legend.
    pub name: &'static str,
    /// Class of the line's colour in the style sheet.
    pub class: &'static str,
    /// Points as seconds and value. A missing value interrupts the line.
    pub points: Vec<(f64, Option<f64>)>,
}

/// Escapes text for HTML.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// A short form of a number.
pub fn number(value: f64) -> String {
    let size = value.abs();
    if size >= 1e6 {
        format!("{:.1}M", value / 1e6)
    } else if size >= 1e4 {
        format!("{:.0}k", value / 1e3)
    } else if size >= 100.0 || value.fract() == 0.0 {
        format!("{value:.0}")
    } else if size >= 1.0 {
        format!("{value:.1}")
    } else {
        format!("{value:.3}")
    }
}

fn frame(title: &str, content: &str) -> String {
    let title = escape(title);
    format!(
        "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{title}\"><title>{title}</title>{content}</svg>"
    )
}

fn text(svg: &mut String, (x, y): (f64, f64), anchor: &str, content: &str) {
    // Writing to a string cannot fail.
    let _ =
        write!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>", escape(content));
}

fn line(svg: &mut String, class: &str, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) {
    let _ =
        write!(svg, "<line class=\"{class}\" x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\"/>");
}

/// Draws horizontal lines with their values, up to `max`. Returns the value at the top of the plot.
fn vertical_axis(svg: &mut String, max: f64) -> f64 {
    let step = round_step(max / 4.0);
    let top = (max / step).ceil().max(1.0) * step;
    let mut value = 0.0;
    while value <= top * 1.001 {
        let y = y(value, top);
        line(svg, "grid", (LEFT, y), (WIDTH - RIGHT, y));
        text(svg, (LEFT - 6.0, y + 4.0), "end", &number(value));
        value += step;
    }
    top
}

/// Returns the least number of at least `least` that is 1, 2 or 5 times a power of ten.
fn round_step(least: f64) -> f64 {
    if least <= 0.0 || !least.is_finite() {
        return 1.0;
    }
    let power = 10f64.powf(least.log10().floor());
    [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|factor| factor * power)
        .find(|step| *step >= least)
        .unwrap_or(least)
}

fn y(value: f64, top: f64) -> f64 {
    HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)
}

/// A histogram of milliseconds on a logarithmic axis, with marks at percentiles. `buckets` are lower bound, upper bound
/// and count.
pub fn histogram(title: &str, buckets: &[(f64, f64, u64)], marks: &[(&str, f64)]) -> String {
    let (Some(first), Some(last)) = (buckets.first(), buckets.last()) else {
        return frame(title, "<text x=\"50%\" y=\"50%\" text-anchor=\"middle\">no samples</text>");
    };
    // Durations are measured in whole microseconds, so no positive value is smaller.
    let low = first.0.max(1e-3).log10();
    let high = last.1.log10().max(low + 0.05);
    let bars = (BARS as f64).min(((high - low) * 60.0).ceil().max(4.0)) as usize;
    let mut counts = vec![0u64; bars];
    let share = |ms: f64| ((ms.max(1e-3).log10() - low) / (high - low)).clamp(0.0, 1.0);
    for (from, to, count) in buckets {
        let middle = share((from.max(1e-3) * to).sqrt());
        counts[((middle * bars as f64) as usize).min(bars - 1)] += count;
    }
    let x = |ms: f64| LEFT + share(ms) * (WIDTH - LEFT - RIGHT);
    let mut svg = String::new();
    let top = vertical_axis(&mut svg, counts.iter().copied().max().unwrap_or(1) as f64);
    let width = (WIDTH - LEFT - RIGHT) / bars as f64;
    for (index, count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
        let (left, top) = (LEFT + index as f64 * width, y(*count as f64, top));
        let _ = write!(
            svg,
            "<rect class=\"bar\" x=\"{left:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{:.1}\"/>",
            (width - 0.8).max(0.6),
            HEIGHT - BOTTOM - top
        );
    }
    for (name, ms) in marks {
        line(&mut svg, "mark", (x(*ms), TOP), (x(*ms), HEIGHT - BOTTOM));
        text(&mut svg, (x(*ms) + 3.0, TOP + 9.0), "start", name);
    }
    for ms in ticks(low, high) {
        text(&mut svg, (x(ms), HEIGHT - BOTTOM + 15.0), "middle", &number(ms));
    }
    text(&mut svg, (WIDTH - RIGHT, HEIGHT - 2.0), "end", "ms");
    frame(title, &svg)
}

/// Returns the marks of a logarithmic axis: powers of ten and, on a short axis, also their multiples by 2 and 5.
fn ticks(low: f64, high: f64) -> Vec<f64> {
    let factors: &[f64] = if high - low > 2.5 { &[1.0] } else { &[1.0, 2.0, 5.0] };
    let powers = low.floor() as i32..=high.ceil() as i32;
    let values = powers.flat_map(|power| factors.iter().map(move |factor| factor * 10f64.powi(power)));
    let mut ticks: Vec<f64> = values.filter(|ms| (low..=high).contains(&ms.log10())).collect();
    if ticks.is_empty() {
        ticks.push(10f64.powf((low + high) / 2.0));
    }
    ticks
}

/// Draws lines over the seconds of a run.
pub fn over_time(title: &str, seconds: f64, series: &[Series]) -> String {
    let values = series.iter().flat_map(|series| series.points.iter().filter_map(|(_, value)| *value));
    let mut svg = String::new();
    let top = vertical_axis(&mut svg, values.fold(0.0, f64::max));
    let seconds = seconds.max(1e-3);
    let x = |second: f64| LEFT + second / seconds * (WIDTH - LEFT - RIGHT);
    let step = round_step(seconds / 8.0);
    let mut second = 0.0;
    while second <= seconds * 1.001 {
        text(&mut svg, (x(second), HEIGHT - BOTTOM + 15.0), "middle", &number(second));
        second += step;
    }
    text(&mut svg, (WIDTH - RIGHT, HEIGHT - 2.0), "end", "s");
    for (index, Series { name, class, points }) in series.iter().enumerate() {
        let mut path = String::new();
        let mut command = 'M';
        for (at, value) in points {
            let Some(value) = value else {
                command = 'M';
                continue;
            };
            let _ = write!(path, "{command}{:.1} {:.1}", x(at.min(seconds)), y(*value, top));
            command = 'L';
        }
        // A line of a single point has no length, so the point is drawn as a circle.
        let _ = write!(svg, "<path class=\"{class}\" d=\"{path}\"/>");
        if let [(at, Some(value))] = points[..] {
            let _ = write!(
                svg,
                "<circle class=\"{class}\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\"/>",
                x(at),
                y(value, top)
            );
        }
        let left = LEFT + 8.0 + 130.0 * index as f64;
        line(&mut svg, class, (left, TOP + 6.0), (left + 16.0, TOP + 6.0));
        text(&mut svg, (left + 20.0, TOP + 10.0), "start", name);
    }
    frame(title, &svg)
}
