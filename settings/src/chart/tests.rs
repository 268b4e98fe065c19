use super::*;

const SCHEMA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/helm/tutti/values.schema.json");

#[test]
fn the_schema_of_the_chart_is_made_from_the_declarations() {
    let stored = std::fs::read_to_string(SCHEMA).expect("the chart has a schema");
    let (by_hand, _) = stored.split_once(MARK).expect("the schema has the line after which it is generated");
    let made = format!("{by_hand}{MARK}{}", definitions());
    serde_json::from_str::<serde_json::Value>(&made).expect("the schema is JSON");
    if std::env::var_os("UPDATE_CHART").is_some() {
        std::fs::write(SCHEMA, &made).expect("the schema can be written");
        return;
    }
    assert!(
        stored == made,
        "deploy/helm/tutti/values.schema.json differs from the declarations: run UPDATE_CHART=1 cargo test -p tutti-settings"
    );
}

#[test]
fn each_setting_that_the_chart_sets_exists_and_all_others_are_in_the_schema() {
    let declared = [ConductorSettings::declared(), RouterProcessSettings::declared()].concat();
    for name in SET_BY_CHART {
        assert!(declared.iter().any(|setting| setting.name == name), "no setting {name}");
    }
    let text = definitions();
    for setting in declared {
        let is_there = text.contains(&format!("\"{}\": {{ ", setting.name));
        assert_eq!(is_there, !SET_BY_CHART.contains(&setting.name), "{}", setting.name);
    }
}
