use super::*;

#[test]
fn the_tables_in_docs_are_made_from_the_declaration() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/api.md");
    let stored = std::fs::read_to_string(path).expect("docs/api.md is there");
    let wanted = update(&stored).expect("docs/api.md has a place for the tables");
    if std::env::var_os("UPDATE_PAGE").is_some() {
        std::fs::write(path, &wanted).expect("docs can be written");
        return;
    }
    assert!(
        stored == wanted,
        "docs/api.md differs from the declaration: run UPDATE_PAGE=1 cargo test -p tutti-parameters"
    );
}

#[test]
fn every_parameter_of_http_is_in_one_table() {
    for parameter in all().filter(|parameter| !parameter.scopes.is_empty()) {
        let tables = SECTIONS.iter().filter(|section| (section.has)(parameter)).count();
        // `model` is in two tables: that of completions and chat, and that of `/tokenize` and `/detokenize`.
        assert_eq!(tables, if parameter.name == "model" { 2 } else { 1 }, "{}", parameter.name);
    }
}
