use super::*;

fn path(name: &str) -> Option<PathBuf> {
    Some(name.into())
}

#[test]
fn a_certificate_needs_its_key_and_a_key_its_certificate() {
    let of = |cert, key| TlsSettings { tls_cert: cert, tls_key: key };
    assert_eq!(of(None, None).files(), Ok(None));
    assert!(of(path("c"), path("k")).files().unwrap().is_some());
    assert_eq!(of(path("c"), None).files().unwrap_err().field, "tls_key");
    assert_eq!(of(None, path("k")).files().unwrap_err().field, "tls_cert");
}

#[test]
fn the_cluster_needs_all_three_files_or_none_of_them_and_not_with_plaintext() {
    let all = ClusterTlsSettings {
        cluster_tls_cert: path("c"),
        cluster_tls_key: path("k"),
        cluster_tls_ca: path("a"),
        insecure_plaintext: false,
    };
    assert!(all.files().unwrap().is_some());
    assert_eq!(ClusterTlsSettings::default().files(), Ok(None));
    let plain = ClusterTlsSettings { insecure_plaintext: true, ..all.clone() };
    assert_eq!(plain.files().unwrap_err().field, "insecure_plaintext");
    for (field, some) in [
        ("cluster_tls_cert", ClusterTlsSettings { cluster_tls_cert: None, ..all.clone() }),
        ("cluster_tls_key", ClusterTlsSettings { cluster_tls_key: None, ..all.clone() }),
        ("cluster_tls_ca", ClusterTlsSettings { cluster_tls_ca: None, ..all.clone() }),
    ] {
        assert_eq!(some.files().unwrap_err().field, field);
    }
}
