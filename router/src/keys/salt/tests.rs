use std::collections::HashSet;

use super::*;

#[test]
fn every_key_and_every_salt_in_it_has_a_salt_of_its_own() {
    let salt = |text| Some(ClientSalt::new(text).unwrap());
    let callers = [
        (None, None),
        (None, salt("one")),
        (None, salt("two")),
        (Some("alice"), None),
        (Some("alice"), salt("one")),
        (Some("alice"), salt("two")),
        (Some("bob"), None),
        (Some("bob"), salt("one")),
        // A client without a key whose salt is a key's name.
        (None, salt("alice")),
    ];
    let salts: HashSet<CacheSalt> = callers.iter().map(|(key, client)| of_caller(*key, *client)).collect();
    assert_eq!(salts.len(), callers.len());
    assert_eq!(of_caller(None, None), CacheSalt::default());
    assert_eq!(of_caller(Some("alice"), salt("one")), of_caller(Some("alice"), salt("one")));
}

#[test]
fn an_empty_salt_is_refused() {
    let error = ClientSalt::new("").unwrap_err();
    assert_eq!(error.field(), Some("cache_salt"));
}
