//! Metrics under the names of vLLM, for dashboards that exist. They are copies, made at each scrape from the text of
//! Tutti's own metrics, so counting costs nothing twice.

/// A metric of vLLM, and the metric of Tutti that has its value.
struct Alias {
    own: &'static str,
    name: &'static str,
    /// A label of Tutti's metric, and its name in vLLM's.
    label: Option<(&'static str, &'static str)>,
    /// True if Tutti's metric is a gauge that never decreases. vLLM's metric is then a counter.
    is_grown_gauge: bool,
}

const fn alias(own: &'static str, name: &'static str) -> Alias {
    Alias { own, name, label: None, is_grown_gauge: false }
}

const fn by_worker(own: &'static str, name: &'static str) -> Alias {
    Alias { own, name, label: Some(("worker", "engine")), is_grown_gauge: true }
}

const ALIASES: [Alias; 12] = [
    alias("tutti_conductor_requests_running", "vllm:num_requests_running"),
    alias("tutti_conductor_requests_waiting", "vllm:num_requests_waiting"),
    alias("tutti_conductor_kv_utilization", "vllm:kv_cache_usage_perc"),
    by_worker("tutti_worker_preemptions", "vllm:num_preemptions"),
    by_worker("tutti_worker_prefill_tokens", "vllm:prefix_cache_queries"),
    by_worker("tutti_worker_cached_tokens", "vllm:prefix_cache_hits"),
    alias("tutti_router_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"),
    alias("tutti_router_inter_token_latency_seconds", "vllm:inter_token_latency_seconds"),
    alias("tutti_router_request_seconds", "vllm:e2e_request_latency_seconds"),
    alias("tutti_router_prompt_tokens", "vllm:prompt_tokens"),
    alias("tutti_router_generated_tokens", "vllm:generation_tokens"),
    Alias {
        label: Some(("reason", "finished_reason")),
        ..alias("tutti_router_choices_finished", "vllm:request_success")
    },
];

/// Returns the copies of those metrics that `text` has. `model` is the name of the served model, the label of all
/// metrics of vLLM.
pub(super) fn copies(text: &str, model: &str) -> String {
    let model = model.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    let mut copies = String::new();
    for alias in &ALIASES {
        let begin = format!("# HELP {} ", alias.own);
        let mut lines = text.lines().skip_while(|line| !line.starts_with(&begin));
        copies.extend(lines.next().map(|help| format!("{}\n", help.replacen(alias.own, alias.name, 1))));
        let lines = lines.take_while(|line| !line.starts_with("# HELP ") && *line != "# EOF");
        copies.extend(lines.map(|line| alias.copy(line, &model)));
    }
    copies
}

impl Alias {
    /// A line of the metric under its name in vLLM, with the model's label.
    fn copy(&self, line: &str, model: &str) -> String {
        if line.starts_with('#') {
            let line = line.replacen(self.own, self.name, 1);
            let kind = if self.is_grown_gauge { line.replace(" gauge", " counter") } else { line };
            return format!("{kind}\n");
        }
        let rest = line.strip_prefix(self.own).unwrap_or(line);
        let at = rest.find(['{', ' ']).unwrap_or(rest.len());
        let (suffix, rest) = rest.split_at(at);
        let suffix = if self.is_grown_gauge { "_total" } else { suffix };
        let (labels, value) = match rest.strip_prefix('{').and_then(|rest| rest.rsplit_once('}')) {
            Some((labels, value)) => (format!(",{labels}"), value),
            None => (String::new(), rest),
        };
        let labels = match self.label {
            Some((own, other)) => labels.replace(&format!(",{own}="), &format!(",{other}=")),
            None => labels,
        };
        format!("{}{suffix}{{model_name=\"{model}\"{labels}}}{value}\n", self.name)
    }
}

#[cfg(test)]
mod tests;
