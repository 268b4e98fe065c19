use super::*;

#[test]
fn the_page_in_docs_is_made_from_the_declarations() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/configuration.md");
    if std::env::var_os("UPDATE_PAGE").is_some() {
        std::fs::write(path, page()).expect("docs can be written");
    }
    let stored = std::fs::read_to_string(path).expect("docs/configuration.md is there");
    assert!(
        stored == page(),
        "docs/configuration.md differs from the declarations: run UPDATE_PAGE=1 cargo test -p tutti-settings"
    );
}
