use super::*;

#[test]
fn messages_carry_salts_of_16_bytes_or_none() {
    let salt = CacheSalt::new([7; BYTES]);
    for salt in [salt, CacheSalt::default()] {
        assert_eq!(CacheSalt::from_message(&salt.to_message()), Ok(salt));
    }
    assert!(CacheSalt::default().to_message().is_empty());
    let refused = CacheSalt::from_message(&[7; 3]).unwrap_err();
    assert_eq!(refused.to_string(), "cache_salt: has 3 bytes, but must have 16 or none");
}

#[test]
fn a_salt_is_told_from_none_by_its_words() {
    assert_eq!(CacheSalt::new([0; BYTES]).words().collect::<Vec<_>>(), [0; 4]);
    assert_eq!(CacheSalt::default().words().count(), 0);
}
