use std::io::Write;

use super::*;

fn read(ending: &str, text: &str) -> Result<Layout, Error> {
    let mut file = tempfile::Builder::new().suffix(ending).tempfile().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    Layout::read(file.path(), DeviceChoice::Auto)
}

#[track_caller]
fn refused(text: &str, message: &str) {
    let error = read(".toml", text).unwrap_err().to_string();
    assert!(error.contains(message), "{error}");
}

#[test]
fn toml_and_yaml_say_the_same() {
    let toml = "[[group]]\nname = 'p'\nwalks = ['prefill_text']\ntp = 2\n[[group]]\nname = 'd'\nranks = 3\n";
    let yaml = "group:\n- {name: p, walks: [prefill_text], tp: 2}\n- {name: d, ranks: 3}\n";
    let layout = read(".toml", toml).unwrap();
    assert_eq!(layout, read(".yaml", yaml).unwrap());
    let groups = layout.topology.groups();
    assert_eq!((groups[0].tp, groups[0].replicas, groups[1].tp, groups[1].replicas), (2, 1, 1, 3));
    assert_eq!(groups[0].walks, Some(vec!["prefill_text".to_owned()]));
    assert_eq!(layout.topology.spawned_workers(), 5);
}

#[test]
fn workers_that_join_by_hand_have_the_last_ranks() {
    let text =
        "[[group]]\nname = 'far'\nspawn = false\n[[group]]\nname = 'near'\nranks = 2\ndevice = 'cpu'\n";
    let layout = read(".toml", text).unwrap();
    let names: Vec<&str> = layout.topology.groups().iter().map(|group| group.name.as_str()).collect();
    assert_eq!((names, layout.topology.spawned_workers()), (vec!["near", "far"], 2));
    assert_eq!(layout.devices, [DeviceChoice::Cpu, DeviceChoice::Auto]);
}

#[test]
fn what_contradicts_itself_is_refused_by_name() {
    let group = |lines: &str| format!("[[group]]\nname = 'g'\n{lines}\n");
    refused(&group("wlaks = ['a']"), "wlaks");
    refused(&group("tp = 'two'"), "tp");
    refused(&group("tp = 0"), "group \"g\": tp: is 0");
    refused(&group("replicas = 257"), "replicas: is 257, the limit is 256");
    refused(&group("ranks = 3\ntp = 2"), "ranks: is 3, which tp 2 does not divide");
    refused(&group("ranks = 3\nreplicas = 2"), "ranks: is 3, which 2 replicas");
    refused(&group("ranks = 3\nreplicas = 2\ntp = 2"), "tp 2 times 2 replicas is 4");
    refused(&group("walks = []"), "walks: is empty");
    refused(&(group("device = 'sim'") + "[[group]]\nname = 'h'"), "run on sim, and others do not");
    refused(&(group("") + &group("")), "group \"g\": name: is that of another");
    refused(&(group("ranks = 200") + "[[group]]\nname = 'h'\nranks = 57"), "257 workers in all");
    refused("group = []", "group: is empty");
    refused("[[group]]\ntp = 1", "name");
    refused("workers = 2", "workers");
}
