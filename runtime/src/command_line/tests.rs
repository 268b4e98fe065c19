use tutti_settings::{ConductorSettings, RouterProcessSettings, WorkerProcessSettings};

use super::*;

const PROCESS: Process = Process {
    name: "process",
    about: "Does it.",
    example: ("a", "1"),
    prints_config: true,
    positional: None,
    serves_models: true,
};

fn given_in<S: Settings>(arguments: &[&str]) -> Value {
    let arguments = ["process"].iter().chain(arguments).map(OsString::from);
    Value::Object(parse::<S>(PROCESS, arguments).unwrap().settings)
}

#[test]
fn commands_are_sound() {
    command::<ConductorSettings>(PROCESS).debug_assert();
    command::<RouterProcessSettings>(PROCESS).debug_assert();
    command::<WorkerProcessSettings>(PROCESS).debug_assert();
}

#[test]
fn only_what_is_given_is_kept_and_stands_in_its_table() {
    assert_eq!(given_in::<ConductorSettings>(&[]), serde_json::json!({}));
    assert_eq!(
        given_in::<ConductorSettings>(&["--workers=1", "--skip-tokenizer-init", "--no-router"]),
        serde_json::json!({ "workers": 1, "no_router": true, "router": { "skip_tokenizer_init": true } })
    );
    assert_eq!(
        given_in::<RouterProcessSettings>(&["--conductor=a", "--conductor=b", "--max-replays=3"]),
        serde_json::json!({ "conductor": ["a", "b"], "fleet": { "max_replays": 3 } })
    );
}

#[test]
fn help_has_one_line_per_flag() {
    let help = command::<ConductorSettings>(PROCESS).render_help().to_string();
    for setting in ConductorSettings::declared().iter().filter(|setting| setting.is_flag) {
        let flag = format!("      --{}", setting.name.replace('_', "-"));
        let line =
            help.lines().find(|line| line.trim_end() == flag || line.starts_with(&(flag.clone() + " ")));
        assert!(line.is_some_and(|line| line.contains(&setting.help)), "{}: {line:?}", setting.name);
    }
}

fn refusal(arguments: &[&str]) -> String {
    let arguments = ["process"].iter().chain(arguments).map(OsString::from);
    parse::<ConductorSettings>(PROCESS, arguments).unwrap_err().to_string()
}

#[test]
fn flags_of_other_servers_get_a_hint() {
    for (arguments, hint) in [
        (&["--tensor-parallel-size", "2"][..], "--tp T divides"),
        (&["--tensor-parallel-size=2"], "--tp T divides"),
        (&["--tp_size", "2"], "--tp T divides"),
        (&["--port", "8000"], "--http IP:PORT"),
        (&["--host", "0.0.0.0"], "--http 0.0.0.0:8000"),
        (&["--dtype", "auto"], "the type that they are stored in"),
        (&["--gpu-memory-utilization", "0.9"], "--kv-cache-memory SIZE"),
        (&["--mem-fraction-static", "0.9"], "--kv-cache-memory SIZE"),
        (&["--max-num-seqs", "8"], "--max-running-requests"),
        (&["--api-key", "x"], "--api-key-file FILE"),
        (&["serve", "some/model", "--tp", "2"], "--model some/model"),
        (&["some/model"], "--model some/model"),
        (&["--tp", "2", "status"], "conductor status"),
    ] {
        let said = refusal(arguments);
        assert!(said.contains("tip: ") && said.contains(hint), "{said}");
        assert!(!said.contains("similar argument"), "{said}");
    }
}

#[test]
fn misspelt_flags_keep_the_similar_one() {
    assert!(refusal(&["--wrokers", "2"]).contains("'--workers'"));
    assert!(refusal(&["--http", "nowhere"]).contains("IP:PORT"));
}
