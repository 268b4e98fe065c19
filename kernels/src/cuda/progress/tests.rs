use std::collections::HashSet;

use super::hash_of;
use super::sources::{SOURCES, names};

#[test]
fn each_kernel_has_a_hash_of_its_own() {
    let names: Vec<_> = names().collect();
    let hashes: HashSet<_> = names.iter().map(|name| hash_of(name)).collect();
    assert!(hashes.len() == names.len() && !hashes.contains(&0), "{names:?}");
    // The test vector of RFC 9923 for "foobar".
    assert_eq!(hash_of("foobar"), 0xbf9c_f968);
}

#[test]
fn each_kernel_says_that_it_begins() {
    for source in SOURCES {
        let text = source.text();
        let [kernels, begins] = ["KERNEL(", "BEGIN("].map(|macro_name| {
            text.matches(macro_name).count() - text.matches(&format!("#define {macro_name}")).count()
        });
        // A comment of the declarations names the macro once.
        assert_eq!(kernels + 1, begins, "{}", source.name);
    }
}
