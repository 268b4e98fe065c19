use std::collections::BTreeSet;

use tutti_settings::{ConductorSettings, Settings};

use super::*;

const PAGE: &str = include_str!("../../../../docs/coming-from-vllm.md");

fn flags(text: &str) -> BTreeSet<String> {
    let names = text.split("--").skip(1).map(|rest| {
        rest.chars().take_while(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || *c == '-').collect()
    });
    names.filter(|name: &String| !name.is_empty()).collect()
}

fn own() -> BTreeSet<String> {
    let declared = ConductorSettings::declared();
    let own = declared.iter().filter_map(|setting| setting.flag());
    own.map(|flag| flag.trim_start_matches('-').to_owned()).chain(["config".to_owned()]).collect()
}

#[test]
fn every_flag_of_the_page_is_ours_or_has_a_hint() {
    let table = PAGE.split("## ").find(|section| section.starts_with("Flags")).unwrap();
    let mut count = 0;
    for row in table.lines().filter(|line| line.starts_with("| `")) {
        let others = row.split('|').skip(1).take(2).collect::<String>();
        for flag in flags(&others).difference(&own()) {
            assert!(of_flag(flag).is_some(), "--{flag} has no hint");
            count += 1;
        }
    }
    assert!(count > 30, "{count} flags were found");
}

#[test]
fn hints_name_flags_that_there_are_and_none_is_ours() {
    for (names, hint) in FLAGS {
        let named = flags(hint);
        assert!(named.is_subset(&own()), "{hint}: {named:?}");
        assert!(names.iter().all(|name| !own().contains(*name)), "{names:?}");
    }
}

#[test]
fn flags_are_found_in_every_spelling() {
    for name in ["--tensor-parallel-size", "--tensor_parallel_size", "tensor_parallel_size", "--tp-size=2"] {
        assert!(of_flag(name).unwrap().starts_with("--tp T"), "{name}");
    }
    assert_eq!(of_flag("--wrokers"), None);
}

#[test]
fn values_without_a_flag_are_models() {
    assert_eq!(of_value("a/b", None), "a model is given as --model a/b");
    assert_eq!(of_value("serve", Some("a/b")), "there is no command serve: a model is given as --model a/b");
    assert_eq!(
        of_value("serve", Some("--tp")),
        "there is no command serve: a model is given as --model MODEL"
    );
    for value in ["true", "4", "0.5"] {
        assert!(of_value(value, None).starts_with(&format!("{value} belongs to no flag")), "{value}");
    }
    assert_eq!(of_value("status", None), "a command comes first, as in `conductor status`");
}
