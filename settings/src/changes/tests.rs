use super::*;
use crate::{ConductorSettings, RouterProcessSettings, Settings};

fn router(json: &str) -> RouterProcessSettings {
    serde_json::from_str(json).expect("settings of a router")
}

fn change(name: &str, old: Option<&str>, new: Option<&str>) -> Change {
    Change { name: name.into(), old: old.map(Into::into), new: new.map(Into::into) }
}

#[test]
fn live_settings_take_new_values_and_others_keep_theirs() {
    let mut settings = router(r#"{ "drain_timeout": 7, "router": { "max_queued_choices": 3 } }"#);
    let new = router(
        r#"{ "log": "debug", "http": "127.0.0.1:1", "lame_duck": 2, "connections": { "max_open": 9, "max_streams": 4 },
            "fleet": { "max_retries": 5 } }"#,
    );
    let mut changes = Changes::default();
    settings.change_to(&new, &mut changes);
    let live = [
        change("drain_timeout", Some("7"), Some("30")),
        change("lame_duck", None, Some("2")),
        change("log", Some("info"), Some("debug")),
        change("connections.max_open", Some("8192"), Some("9")),
        change("router.max_queued_choices", Some("3"), None),
    ];
    assert_eq!(changes.live, live);
    assert_eq!(changes.restart, ["http", "connections.max_streams", "fleet.max_retries"]);
    let in_force = router(r#"{ "log": "debug", "lame_duck": 2, "connections": { "max_open": 9 } }"#);
    assert_eq!(settings, in_force);
    assert_eq!(changes.live[4].to_string(), "router.max_queued_choices 3 -> not set");

    // A changed setting that needs a restart is reported each time, until the process restarts.
    let mut again = Changes::default();
    settings.change_to(&new, &mut again);
    assert_eq!(again, Changes { live: vec![], restart: changes.restart });
}

#[test]
fn equal_settings_have_no_changes() {
    let (mut settings, new) = (ConductorSettings::default(), ConductorSettings::default());
    let mut changes = Changes::default();
    settings.change_to(&new, &mut changes);
    assert_eq!(changes, Changes::default());
}

/// `docs/operations.md` has one list of the settings that change live, for both processes.
#[test]
fn the_same_settings_change_live_in_router_and_conductor() {
    let live = |declared: Vec<crate::Setting>| -> Vec<String> {
        let live = declared.into_iter().filter(|setting| setting.is_live);
        live.map(|setting| qualified(setting.table, setting.name)).collect()
    };
    let of_router = live(RouterProcessSettings::declared());
    assert_eq!(of_router.len(), 23, "{of_router:?}");
    let (mut of_conductor, mut sorted) = (live(ConductorSettings::declared()), of_router);
    of_conductor.sort();
    sorted.sort();
    assert_eq!(of_conductor, sorted);
}
