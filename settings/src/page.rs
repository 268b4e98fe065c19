//! The page `docs/configuration.md`, made from the declarations.

use std::fmt::Write;

use crate::{
    ConductorSettings, DrainProcessSettings, KernelsProcessSettings, Kind, QuantizeProcessSettings,
    RouterProcessSettings, Setting, Settings, StatusProcessSettings, TraceProcessSettings,
    WorkerProcessSettings,
};

const INTRODUCTION: &str = "\
# Configuration

<!-- Made from the declarations in settings/src: `UPDATE_PAGE=1 cargo test -p tutti-settings` writes it again. -->

Each setting has one name. It can be given in four places, and each goes over those before it:

1. the default,
2. a TOML or YAML file, named by `--config FILE` ([an example](../deploy/conductor.toml)),
3. an environment variable: `TUTTI_` and the name in capitals, with two underscores after a table's name, as in
   `TUTTI_SIM__FAIL_EVERY`,
4. a flag, where the table below has one.

A key that no setting has is refused by name, and so is a value out of its range, before any port is bound.
`--print-config` prints what is in force as JSON and exits. Defaults suit one machine; nothing has to be set.

Settings marked *live* take a new value [without a restart](operations.md#how-do-i-change-settings-without-a-restart), all
others when the process starts.
";

const MEMORY: &str = "
## Memory of the workers

`kv_cache_memory` is the size of one worker's planes: pages of keys and values and, in models that have them, slots of
state. Without it, a worker takes what its requests can use, bounded by its share of the machine:

- The conductor divides the memory that is free when it starts by the number of workers that it starts, and tells each
  worker its share. The workers of one conductor therefore never take more than the machine has, in whatever order they
  load. A worker that joins by hand takes all memory that is free as its share; give it `kv_cache_memory` if it is not
  alone on its machine.
- Seven eighths of the share, less the bytes of the weights, of the largest step and, for a model with media, of
  `embedding_memory` and `encoder_cache_memory`, go to planes, if so much is free once the weights are loaded. The last
  eighth stays for the system, the conductor and cached files.
- A worker whose weights leave less than that still takes 1/8 of what is free, at most 2GiB: weights that several workers
  map from `packed_weights` count for each of them, but are in memory once.

Before a worker starts, the conductor compares the weights of all workers that it starts on this machine's CPU, and their
smallest planes, with the memory that is free: of the machine, and under the limits of the conductor's own control group and
of those around it (version 1 or 2). If there is too little, it ends with both figures, and with [exit
code](operations.md#how-do-i-stop-it) 64 if there could not be more, else 70. Weights that are mapped from `packed_weights` do
not count. Each worker compares again before it loads, with the memory of its own device. Where `--device auto` may mean a GPU,
only the worker does.

Swap does not count as free memory, because every step reads all weights: a model that is partly in swap answers at the speed
of the disk. With `no_memory_check` a model loads all the same, with a warning that has both figures. That is for systems whose
figures are too low: memory that another process is about to give back, weights in compressed swap, or a test that may be
slow. If the memory does run out, the kernel ends the worker.

The memory of a size that is given is taken at a CPU worker's start, so that no request waits while the system clears it.
If less is free than that, and without a size, memory is taken when a page is first written. In a model with slots, each of
`max_running_requests` has one. If that setting is not given, a worker runs as many requests as half of the budget has slots
for, at most 128. A quarter of what these leave of the budget holds snapshots of the prefix cache, and the rest is pages.
";

/// Returns the whole page.
pub fn page() -> String {
    let mut page = INTRODUCTION.to_owned();
    let processes = [
        (
            "`conductor`",
            "Serves a model with its workers and, unless `no_router` is set, a router in front. Which groups of workers \
             there are and what each runs stands in a [topology file](topologies.md).",
            ConductorSettings::declared(),
        ),
        (
            "`router`",
            "A router that is a process of its own, in front of one conductor or [several](several-conductors.md).",
            RouterProcessSettings::declared(),
        ),
        (
            "`worker`",
            "A worker that joins by hand. Its conductor sends it all other settings.",
            until_restart(WorkerProcessSettings::declared()),
        ),
        (
            "`conductor kernels`",
            "Compiles the kernels of NVIDIA GPUs [ahead of time](cuda.md#ahead-of-time).",
            KernelsProcessSettings::declared(),
        ),
        (
            "`conductor quantize`",
            "Reads a checkpoint and writes it with matrices of four or eight bits \
             ([formats](formats.md#writing-quantised-checkpoints)).",
            QuantizeProcessSettings::declared(),
        ),
        (
            "`conductor status`",
            "Prints the workers and the queue of a [running conductor](operations.md#how-do-i-look-into-a-running-cluster).",
            StatusProcessSettings::declared(),
        ),
        (
            "`conductor drain`",
            "Drains a worker, or a conductor with its workers, and waits for the end.",
            DrainProcessSettings::declared(),
        ),
        (
            "`conductor trace`",
            "Prints the life of one of the last requests. The request is an argument without a flag, as in \
             `conductor trace 12`.",
            without_flag(TraceProcessSettings::declared(), "request"),
        ),
    ];
    for (name, about, settings) in processes {
        // Writing to a String cannot fail.
        let _ = writeln!(page, "\n## {name}\n\n{about}");
        for section in sections(&settings) {
            write_section(&mut page, &section);
        }
    }
    page + MEMORY
}

/// Takes the flag from the setting of this name.
fn without_flag(mut settings: Vec<Setting>, name: &str) -> Vec<Setting> {
    settings.iter_mut().filter(|setting| setting.name == name).for_each(|setting| setting.is_flag = false);
    settings
}

/// Marks all settings as read at the start only, so that none changes live.
fn until_restart(mut settings: Vec<Setting>) -> Vec<Setting> {
    settings.iter_mut().for_each(|setting| setting.is_live = false);
    settings
}

/// Groups settings into sections: settings at the top of the file by heading, then settings in tables by table.
/// Sections are in the order of their first settings.
fn sections(settings: &[Setting]) -> Vec<Vec<&Setting>> {
    let mut sections: Vec<Vec<&Setting>> = Vec::new();
    let title = |setting: &Setting| setting.table.unwrap_or(setting.heading);
    let (tables, top): (Vec<_>, Vec<_>) = settings.iter().partition(|setting| setting.table.is_some());
    for setting in top.into_iter().chain(tables) {
        match sections.iter_mut().find(|section| title(section[0]) == title(setting)) {
            Some(section) => section.push(setting),
            None => sections.push(vec![setting]),
        }
    }
    sections
}

fn write_section(page: &mut String, settings: &[&Setting]) {
    let title = match settings[0].table {
        Some(table) => format!("Table `{table}`"),
        None => settings[0].heading.to_owned(),
    };
    let _ = writeln!(page, "\n### {title}\n\n| setting | flag | variable | default | value | meaning |");
    let _ = writeln!(page, "|---|---|---|---|---|---|");
    for setting in settings {
        let flag = setting.flag().map_or_else(String::new, |flag| format!("`{flag}`"));
        let default = setting.default.as_deref().unwrap_or(match setting.kind {
            Kind::Switch => "off",
            _ => "none",
        });
        let unit = setting.unit.unwrap_or_default().replace('|', " or ").replace('_', " ").to_lowercase();
        let meaning = meaning(setting);
        let name = setting.name;
        let _ = writeln!(
            page,
            "| `{name}` | {flag} | `{}` | {default} | {unit} | {meaning} |",
            variable(setting)
        );
    }
    for setting in settings {
        if let Kind::Choice(choices) = setting.kind {
            let _ = writeln!(page, "\n`{}`:\n", setting.name);
            for choice in choices {
                let _ = writeln!(page, "- `{}`: {}", choice.name, choice.help.trim());
            }
        }
    }
}

fn variable(setting: &Setting) -> String {
    let table = setting.table.map_or_else(String::new, |table| format!("{table}__"));
    format!("TUTTI_{table}{}", setting.name).to_uppercase()
}

fn meaning(setting: &Setting) -> String {
    let mut meaning = setting.help.replace('|', "\\|");
    if !meaning.ends_with('.') {
        meaning.push('.');
    }
    match setting.range {
        (0, u64::MAX) => {}
        (min, u64::MAX) => meaning += &format!(" At least {min}."),
        (0, max) => meaning += &format!(" At most {max}."),
        (min, max) => meaning += &format!(" From {min} to {max}."),
    }
    if setting.is_live {
        meaning += " *Live.*";
    }
    meaning
}

#[cfg(test)]
mod tests;
