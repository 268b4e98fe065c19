use clap::CommandFactory;

use super::*;

fn plan(arguments: &[&str]) -> Result<Plan, String> {
    let parsed = Arguments::try_parse_from(std::iter::once(&"tutti-bench").chain(arguments));
    parsed.map_err(|e| e.to_string())?.plan().map_err(|e| e.to_string())
}

#[test]
fn the_flags_fit_each_other() {
    Arguments::command().debug_assert();
}

#[test]
fn a_wrong_argument_is_refused_by_its_flag_and_value() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "{\"prompt\": \"a\", \"max_tokens\": 1}\n").unwrap();
    let path = file.path().to_str().unwrap();
    for (arguments, why) in [
        (&["--rate", "0"][..], "'0' for '--rate <R>': must be a number from 0.000001 on"),
        (&["--rate", "nan"], "'nan' for '--rate <R>'"),
        (&["--concurrency", "0"], "'0' for '--concurrency <N>'"),
        (&["--concurrency", "2", "--rate", "2"], "'--concurrency <N>' cannot be used with '--rate <R>'"),
        (&["--duration", "5"], "'5' for '--duration <DURATION>': must be a number over 0 with a unit"),
        (&["--duration=-1s"], "'-1s' for '--duration <DURATION>'"),
        (&["--slo-itl", "0ms"], "'0ms' for '--slo-itl <DURATION>'"),
        (&["--input-tokens", "5:4"], "'5:4' for '--input-tokens <LENGTHS>': MIN is 5, which is over MAX, 4"),
        (&["--body", "[]"], "'[]' for '--body <JSON>': must be a JSON object"),
        (&["--body", r#"{"n": 2}"#], "--body: n cannot be set"),
        (&["--api", "grpc", "--body", r#"{"top_p": 1}"#], "--body: top_p cannot be set over gRPC"),
        (&["--api", "http"], "'http' for '--api <API>'"),
        (&["--url", "localhost:8000"], "--url: must begin with http:// or https://, and is localhost:8000"),
        (&["--workload", "/nowhere"], "/nowhere: No such file"),
        (&["--api-key-file", "/dev/null"], "--api-key-file: /dev/null must hold one key"),
        (&["--json", "/nowhere/report"], "/nowhere/report: No such file"),
        (&["--replay"], "--workload <FILE>"),
        (&["--workload", path, "--replay"], "--replay: needs a workload whose lines have arrival_s"),
        (&["--workload", path, "--repeat"], "--repeat: needs --requests or --duration"),
        (&["--workload", path, "--words"], "'--workload <FILE>' cannot be used with '--words'"),
    ] {
        let error = plan(arguments).unwrap_err();
        assert!(error.contains(why), "{arguments:?}: {error}");
    }
}

#[test]
fn defaults_depend_on_other_flags() {
    let closed = plan(&[]).unwrap();
    assert_eq!(closed.target.url, "http://127.0.0.1:8000");
    assert!(matches!(closed.load, Load::Closed { concurrency: DEFAULT_CONCURRENCY }));
    assert_eq!(closed.limits.requests, Some(DEFAULT_REQUESTS));
    let open = plan(&["--api", "grpc", "--rate", "inf", "--duration", "1.5m"]).unwrap();
    assert_eq!(open.target.url, "http://127.0.0.1:50051");
    assert_eq!((open.limits.requests, open.limits.duration), (None, Some(Duration::from_secs(90))));
    assert_eq!(open.described_load["rate"], "inf");
    let chat = plan(&["--api", "chat"]).unwrap();
    assert_eq!(chat.described_workload["alphabet"], "words");
}
