use super::*;

#[test]
fn a_process_that_cannot_read_its_settings_writes_in_the_format_that_it_was_asked_for() {
    let arguments = |line: &str| line.split(' ').map(OsString::from).collect::<Vec<_>>().into_iter();
    let json = Some(OsString::from("json"));
    for (line, variable, format) in [
        ("conductor --workers x", None, LogFormat::Text),
        ("conductor --log-format json --workers x", None, LogFormat::Json),
        ("conductor --log-format=json", None, LogFormat::Json),
        ("conductor --workers x", json.clone(), LogFormat::Json),
        ("conductor --log-format text", json, LogFormat::Text),
        ("conductor --log-format", None, LogFormat::Text),
    ] {
        assert_eq!(presumed(arguments(line), variable), format, "{line}");
    }
}

#[test]
fn a_line_in_json_begins_with_time_level_process_and_rank() {
    let line = LogName { process: "worker", rank: Some(3) }.line(Level::WARN).unwrap();
    assert_eq!(line.keys().collect::<Vec<_>>(), ["timestamp", "level", "process", "rank"]);
    assert_eq!(
        (&line["level"], &line["process"], &line["rank"]),
        (&"WARN".into(), &"worker".into(), &3.into())
    );
    assert!(!LogName::of("router").line(Level::WARN).unwrap().contains_key("rank"));
}
